import { useQuery } from '@tanstack/react-query'
import { isFinished } from '../../api/jobs'
import { recipe as recipeQuery } from '../../api/queries'
import type { ShownTrial, Study } from '../../api/types'
import { count, duration, localTime } from '../../format'
import { Figures } from '../../parts/Figures'
import { verified } from '../../parts/verified'

/** What the trial cost, and which engines scored its samples with which weights. */
export function Provenance({ study, trial }: { study: Study; trial: ShownTrial }) {
  return (
    <>
      <section aria-labelledby="cost">
        <h2 id="cost">Cost</h2>
        <Cost trial={trial} />
      </section>
      <section aria-labelledby="provenance">
        <h2 id="provenance">Provenance</h2>
        <Origin study={study} trial={trial} />
      </section>
    </>
  )
}

function Cost({ trial }: { trial: ShownTrial }) {
  const times = Object.entries(trial.timings_s)
  return (
    <Figures
      rows={[
        { term: 'samples scored', value: count(trial.samples_scored) },
        {
          term: 'samples reused',
          value: count(trial.samples_reused),
          note: 'stored already: of lower rungs, or of a trial with the same recipe',
        },
        {
          term: 'time',
          value: times.length === 0 ? 'none yet' : seconds(times.reduce((sum, [, each]) => sum + each, 0)),
          note: times.map(([name, each]) => `${name} ${seconds(each)}`).join(', '),
        },
      ]}
    />
  )
}

function Origin({ study, trial }: { study: Study; trial: ShownTrial }) {
  const recipe = useQuery(recipeQuery(study.id, trial.number))
  const { provenance } = trial
  const replicas = Object.entries(provenance.replicas)
  const rows = [
    { term: 'recipe', value: <code>{trial.recipe_digest}</code> },
    {
      term: 'verification',
      value: provenance.verification
        ? verified(provenance.verification)
        : study.state === 'FAILED' || study.state === 'CANCELLED'
          ? '○ Not verified: the study ended before its trials were scored again with transformers'
          : isFinished(study)
            ? '○ Not verified: the trial was not one of those that were scored again with transformers'
            : '○ Not verified yet: trials are scored again with transformers at the end of the study',
    },
    {
      term: 'samples by replica',
      value: replicas.length === 0 ? 'none' : replicas.map(([name, n]) => `${name}: ${count(n)}`).join(', '),
    },
    ...(provenance.engines.length === 0 ? [] : [{ term: 'engine', value: provenance.engines.join('; ') }]),
    ...provenance.fingerprints.map((each) => ({ term: 'weights in the engine', value: <code>{each}</code> })),
    ...(provenance.finished_at === null ? [] : [{ term: 'last scored', value: <Time of={provenance.finished_at} /> }]),
    ...Object.entries(recipe.data?.models ?? {}).map(([alias, each]) => ({
      term: `weights of ${alias}`,
      value: <code>{each}</code>,
    })),
  ]
  return (
    <dl className="facts">
      {rows.map(({ term, value }, k) => (
        // oxlint-disable-next-line react/no-array-index-key
        <div key={k}>
          <dt>{term}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  )
}

function Time({ of: time }: { of: string }) {
  return (
    <time dateTime={time} title={time}>
      {localTime(time)}
    </time>
  )
}

const seconds = (x: number) => (x < 10 ? `${x.toFixed(2)}s` : duration(x))
