import './rungs.css'
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { api } from '../../api/client'
import { plot, stops, summary } from '../../api/queries'
import type { components } from '../../api/schema'
import type { Trial } from '../../api/types'
import { count } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { WithError } from '../../parts/WithError'
import { State } from '../../parts/State'
import { rungsRoute } from '../../router'
import { Lead } from '../../parts/Lead'
import { useStudy } from './StudyLayout'

type Place = components['schemas']['RungPlace']
type StoppedTrial = components['schemas']['StoppedTrial']

// What becomes of a trial at a rung, in the order of the bar.
const ENDS = ['finished', 'promoted', 'running', 'stopped', 'failed'] as const

// Stopped trials of a rung that are listed, and failed ones.
const LISTED = 100
// Failed trials that are read, the most that the server gives: those without a rung cannot be asked for alone.
const MAX_READ = 1000

/** For each bracket of successive halving the trials at each rung, and who was stopped there and why. */
export function Rungs() {
  const { study } = useStudy()
  const rungs = useQuery(plot(study.id, 'rungs'))
  return (
    <Answer of={rungs}>
      {({ places }) =>
        places.length === 0 ? (
          <Nothing>No trial is in a bracket yet, or the scheduler of the study has no brackets.</Nothing>
        ) : (
          <>
            <p className="row soft ends" style={{ fontSize: 13.5 }}>
              {ENDS.map((end) => (
                <span key={end}>
                  <span className={`swatch ${end}`} aria-hidden="true" />
                  {end}
                </span>
              ))}
            </p>
            {[...new Set(places.map((place) => place.bracket))].map((bracket) => (
              <Bracket key={bracket} bracket={bracket} places={places.filter((each) => each.bracket === bracket)} />
            ))}
            <p className="soft">
              A bracket is a ladder of rungs, and a rung a number of samples at which trials are compared. The widths of
              the bars are numbers of trials. Baselines are in no bracket.
            </p>
          </>
        )
      }
    </Answer>
  )
}

function Bracket({ bracket, places }: { bracket: number; places: Place[] }) {
  const chosen = rungsRoute.useSearch()
  const navigate = rungsRoute.useNavigate()
  const most = Math.max(...places.map((place) => place.entered))
  const first = Math.min(...places.map((place) => place.rung))
  return (
    <section aria-labelledby={`bracket-${bracket}`}>
      <h2 id={`bracket-${bracket}`}>Bracket {bracket}</h2>
      <ol className="ladder ends">
        {places.map((place) => {
          const isOpen = chosen.bracket === `${bracket}` && chosen.rung === `${place.rung}`
          const search = isOpen ? {} : { bracket: `${bracket}`, rung: `${place.rung}` }
          return (
            <li key={place.rung}>
              <button type="button" aria-expanded={isOpen} onClick={() => navigate({ search, replace: true })}>
                <span>
                  Rung {place.rung}
                  {place.samples !== null && <span className="soft"> {count(place.samples)} samples</span>}
                </span>
                <Bar place={place} most={most} />
                <span className="counts">{numbers(place)}</span>
              </button>
              {isOpen && <Ended place={place} isFirst={place.rung === first} />}
            </li>
          )
        })}
      </ol>
    </section>
  )
}

function Bar({ place, most }: { place: Place; most: number }) {
  return (
    <span className="bar-of-rung" aria-hidden="true" style={{ width: `${(100 * place.entered) / Math.max(1, most)}%` }}>
      {ENDS.filter((end) => place[end] > 0).map((end) => (
        <span key={end} className={end} style={{ flex: place[end] }} title={`${count(place[end])} ${end}`} />
      ))}
    </span>
  )
}

function numbers(place: Place): string {
  const ends = ENDS.filter((end) => place[end] > 0).map((end) => `${count(place[end])} ${end}`)
  return `${count(place.entered)} entered: ${ends.join(', ')}`
}

const trialsIn = (id: string, state: 'PRUNED' | 'FAIL', where: string, limit: number) => ({
  queryKey: ['study', id, 'trials', 'ended', state, where],
  queryFn: async ({ signal }: { signal: AbortSignal }) => {
    const query = { state, where: [where], limit }
    return (await api.GET('/v1/studies/{study_id}/trials', { params: { path: { study_id: id }, query }, signal })).data!
  },
})

/** The trials that ended at one rung: those that were stopped, with the rule that stopped them, and failed ones. */
function Ended({ place, isFirst }: { place: Place; isFirst: boolean }) {
  const { study } = useStudy()
  const { bracket, rung } = place
  const stopped = useQuery(trialsIn(study.id, 'PRUNED', `bracket=${bracket},rung=${rung}`, LISTED))
  // A trial that failed here has finished the rung before this one.
  const before = isFirst ? `bracket=${bracket}` : `bracket=${bracket},rung=${rung - 1}`
  const failed = useQuery({ ...trialsIn(study.id, 'FAIL', before, MAX_READ), enabled: place.failed > 0 })
  const races = useQuery(plot(study.id, 'races'))
  const results = useQuery(summary(study.id))
  const compared = useQuery(stops(study.id, { bracket, rung }))
  const rules = new Map(races.data?.trials.map((each) => [each.trial, each.rule]))
  if (place.stopped + place.failed === 0) return <Nothing>No trial was stopped here, and none has failed.</Nothing>
  const hasFailedHere = ({ rungs }: Trial) => (rungs.length ? rungs.at(-1)!.rung + 1 === rung : isFirst)
  const failedHere = (failed.data?.trials.filter(hasFailedHere) ?? []).slice(0, LISTED)
  return (
    <Answer of={stopped}>
      {({ trials, total }) => {
        const all = [...trials, ...failedHere]
        const best = results.data?.best?.trial
        const comparisons = new Map(compared.data?.trials.map((each) => [each.trial, each]))
        return (
          <>
            {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
            <div className="wide" tabIndex={0} role="region" aria-label={`Trials that ended at rung ${rung}`}>
              <EndedTable trials={all} rules={rules} best={best} comparisons={comparisons} />
            </div>
            <p className="soft">
              {total > trials.length && `The first ${count(trials.length)} of ${count(total)} stopped trials. `}
              {failed.isSuccess &&
                place.failed > failedHere.length &&
                `The first ${count(failedHere.length)} of ${count(place.failed)} failed trials. `}
              <Link
                to="/studies/$id/trials"
                params={{ id: study.id }}
                search={{ state: 'PRUNED', where: `bracket=${bracket},rung=${rung}` }}
              >
                The stopped trials in the table
              </Link>
              . {RIVALS}
            </p>
            {[failed, races, compared].map(
              (query, k) =>
                query.error && (
                  // oxlint-disable-next-line react/no-array-index-key
                  <Failure key={k} error={query.error} retry={() => query.refetch()} />
                ),
            )}
          </>
        )
      }}
    </Answer>
  )
}

const RIVALS =
  'A rival is the trial against which a trial was stopped: in a race one that was ahead, otherwise the last one that ' +
  'the rung promoted. Differences are paired, on the samples of the rung; grey where the 95 % interval contains 0.'

function EndedTable(props: {
  trials: Trial[]
  rules: Map<number, string | null>
  best: number | undefined
  comparisons: Map<number, StoppedTrial>
}) {
  const { trials, rules, best, comparisons } = props
  const { study } = useStudy()
  const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.rungs.at(-1)?.values ?? {})))]
  return (
    <table className="data">
      <thead>
        <tr>
          <th scope="col">trial</th>
          <th scope="col" className="l">
            state
          </th>
          {names.map((name) => (
            <th key={name} scope="col">
              {name}
            </th>
          ))}
          <th scope="col" className="l">
            why
          </th>
          <th scope="col">rival</th>
          <th scope="col">minus its rival</th>
          <th scope="col" className="l">
            samples
          </th>
        </tr>
      </thead>
      <tbody>
        {trials.map((trial) => {
          const last = trial.rungs.at(-1)
          const stop = comparisons.get(trial.number)
          const rival = stop?.rival ?? undefined
          const beside = rival ?? best
          return (
            <tr key={trial.number}>
              <th scope="row">
                <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${trial.number}` }}>
                  {trial.number}
                </Link>
              </th>
              <td className="l">
                <State state={trial.state} />
              </td>
              {names.map((name) => (
                <td key={name}>
                  <WithError value={last?.values[name]} error={last?.standard_errors[name]} />
                </td>
              ))}
              <td className="l wrap" style={{ minWidth: 220 }}>
                {rules.get(trial.number) ?? trial.reason}
              </td>
              <td>
                {rival !== undefined && (
                  <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${rival}` }}>
                    {rival}
                  </Link>
                )}
              </td>
              <td>
                <Lead look={stop?.looks.at(-1)} />
              </td>
              <td className="l">
                {last && beside !== undefined && (
                  <Link
                    to="/studies/$id/trials/$number/samples"
                    params={{ id: study.id, number: `${trial.number}` }}
                    search={{ against: `${beside}` }}
                    aria-label={`beside trial ${beside}: samples of trial ${trial.number}`}
                  >
                    beside trial {beside}
                  </Link>
                )}
              </td>
            </tr>
          )
        })}
      </tbody>
    </table>
  )
}
