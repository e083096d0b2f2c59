import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useLive } from '../../api/live'
import { study as studyQuery, summary as summaryQuery, trial as trialQuery } from '../../api/queries'
import type { ShownTrial, Study, Summary } from '../../api/types'
import { ownLabel } from '../../format'
import { Answer } from '../../parts/Answer'
import { Page } from '../../parts/Page'
import { State } from '../../parts/State'
import { trialRoute } from '../../router'
import { Actions } from './Actions'
import { CopyAs } from './CopyAs'
import { Merge } from './Merge'
import { Provenance } from './Provenance'
import { Scores } from './Scores'
import { Stopped } from './Stopped'

/** One trial: its merge, its values on search and held-out data, what they cost and where they come from. */
export function TrialPage() {
  const { id, number } = trialRoute.useParams()
  const study = useQuery(studyQuery(id))
  const trial = useQuery(trialQuery(id, Number(number)))
  const summary = useQuery(summaryQuery(id))
  useLive(`/v1/studies/${id}`, ['study', id], study.data?.last_event_id)
  const before = (
    <nav aria-label="Breadcrumb">
      <Link to="/studies/$id" params={{ id }}>
        {study.data?.name ?? id}
      </Link>
    </nav>
  )
  return (
    <Page title={`Trial ${number}`} before={before}>
      <Answer of={study}>
        {(whole) => (
          <Answer of={trial}>
            {(found) => (
              <>
                <Head trial={found} />
                <Neighbours study={whole} trial={found} best={summary.data?.best?.trial} />
                <Actions key={found.number} study={whole} trial={found} />
                <Answer of={summary}>
                  {(results) => (
                    <>
                      <Warnings trial={found} summary={results} />
                      <Scores study={whole} trial={found} summary={results} />
                    </>
                  )}
                </Answer>
                {found.rival !== null && <Stopped study={whole} trial={found} />}
                <Merge study={whole} trial={found} />
                <Provenance trial={found} study={whole} />
                <CopyAs key={found.number} study={whole} trial={found} />
              </>
            )}
          </Answer>
        )}
      </Answer>
    </Page>
  )
}

/** State, label and origin of the trial; why it failed, and why it is invalid. */
function Head({ trial }: { trial: ShownTrial }) {
  return (
    <>
      <p>
        <State state={trial.state} /> {[ownLabel(trial.number, trial.label), trial.origin].filter(Boolean).join(', ')}
        {trial.bracket !== null && `, bracket ${trial.bracket}`}
        {trial.reason && `: ${trial.reason}`}
      </p>
      {trial.invalid !== null && (
        <p>
          <strong>⚠ Invalid</strong>: {trial.invalid}. The trial is left out of the front, of held-out results and of
          every comparison.
        </p>
      )}
    </>
  )
}

/** Links to the trials before and after, to the samples, and to the comparison with the best trial. */
function Neighbours({ study, trial, best }: { study: Study; trial: ShownTrial; best: number | undefined }) {
  const { id } = study
  const { number } = trial
  const total = Object.values(study.trials).reduce((a, b) => a + b, 0)
  const to = '/studies/$id/trials/$number'
  return (
    <nav className="views" aria-label="Trials">
      {number > 0 && (
        <Link to={to} params={{ id, number: `${number - 1}` }}>
          ← Trial {number - 1}
        </Link>
      )}
      {number + 1 < total && (
        <Link to={to} params={{ id, number: `${number + 1}` }}>
          Trial {number + 1} →
        </Link>
      )}
      <Link to="/studies/$id/trials/$number/samples" params={{ id, number: `${number}` }}>
        Samples
      </Link>
      {best !== undefined && best !== number && (
        <Link to="/studies/$id/compare" params={{ id }} search={{ trials: `${best},${number}` }}>
          Compare with the best, trial {best}
        </Link>
      )}
      <Link to="/studies/$id/trials" params={{ id }} activeOptions={{ exact: true }}>
        All trials
      </Link>
    </nav>
  )
}

/** What is to be careful about: samples outside the range of an objective, and constraints that the trial violates. */
function Warnings({ trial, summary }: { trial: ShownTrial; summary: Summary }) {
  const ofRange = summary.warnings.filter((warning) => warning.trial === trial.number)
  const violated = Object.entries(trial.violations)
  if (ofRange.length + violated.length === 0) return null
  return (
    <ul style={{ listStyle: 'none', padding: 0 }}>
      {violated.map(([constraint, by]) => (
        <li key={constraint}>
          ⚠ The trial violates the constraint {constraint} by {by.toPrecision(3)}.
        </li>
      ))}
      {ofRange.map((warning) => (
        <li key={warning.objective}>
          ⚠ {warning.objective}: {warning.message}
        </li>
      ))}
    </ul>
  )
}
