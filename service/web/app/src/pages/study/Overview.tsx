import { useQuery } from '@tanstack/react-query'
import { useMemo } from 'react'
import { columns, plot, summary } from '../../api/queries'
import type { Progress, Study, Summary } from '../../api/types'
import { count, duration, percent, value, withMinuses } from '../../format'
import { Answer } from '../../parts/Answer'
import { Figures } from '../../parts/Figures'
import { Interval } from '../../parts/Interval'
import { stepsOf } from '../../parts/steps'
import { verified } from '../../parts/verified'
import { overviewRoute } from '../../router'
import { Checks } from './Checks'
import { Front } from './Front'
import { HeldOut } from './HeldOut'
import { History } from './History'
import { Hypervolume } from './Hypervolume'
import { Lineage } from './Lineage'
import { Policies } from './Policies'
import { Selected } from './Selected'
import { useStudy } from './StudyLayout'

const FIELDS = 'number,label,state,origin,rung,samples,value.*,standard_error.*'

const PARAMETER = 'parameter.'

const NO_ROWS: Summary['holdout'] = []

/** The finding, key figures, history, front and held-out values of a study; each is shown as soon as it is there. */
export function Overview() {
  const { study, progress } = useStudy()
  const results = useQuery(summary(study.id))
  const front = useQuery(plot(study.id, 'front'))
  const ranges = overviewRoute.useSearch({ select: (search) => search.ranges })
  // Most addresses have no ranges, so what reads them is loaded where there are some.
  const { data: reading } = useQuery({
    queryKey: ['module', 'ranges'],
    queryFn: () => import('../../charts/ranges'),
    enabled: ranges !== undefined,
    staleTime: Infinity,
  })
  const wanted = useMemo(() => (ranges === undefined ? undefined : reading?.asked(ranges)), [ranges, reading])
  const parameters = [...(wanted?.keys() ?? [])].filter((column) => column.startsWith(PARAMETER))
  const trials = useQuery({
    ...columns(study.id, [FIELDS, ...parameters].join(',')),
    placeholderData: (old) => old, // the same trials, without or with columns of the ranges
  })
  const all = trials.data?.columns
  const isComplete = !trials.isPlaceholderData
  const selection = useMemo(
    () => (all && isComplete && wanted ? reading?.selection(all, wanted) : undefined),
    [all, wanted, isComplete, reading],
  )
  return (
    <>
      <Answer of={results}>
        {(found) => (
          <>
            <p style={{ fontSize: 18 }}>{withMinuses(found.finding.text)}</p>
            <Key study={study} progress={progress} summary={found} />
            <Careful summary={found} />
          </>
        )}
      </Answer>
      <section aria-labelledby="history">
        <h2 id="history">History</h2>
        <Selected
          study={study}
          ranges={ranges}
          selection={selection}
          isLoading={trials.isPending || trials.isPlaceholderData || wanted === undefined}
        />
        <Answer of={trials}>
          {(found) => <History study={study} trials={found.columns} front={front.data?.points} selection={selection} />}
        </Answer>
      </section>
      <section aria-labelledby="front">
        <h2 id="front">{study.objectives.length > 1 ? 'Pareto front' : 'Best trial'}</h2>
        <Answer of={front}>
          {(points) => (
            <Front study={study} front={points} heldOut={results.data?.holdout ?? NO_ROWS} selection={selection} />
          )}
        </Answer>
      </section>
      {study.objectives.length > 1 && <Hypervolume study={study} />}
      <Policies study={study} />
      <section aria-labelledby="held-out">
        <h2 id="held-out">Held-out data</h2>
        <Answer of={results}>{(found) => <HeldOut study={study} summary={found} />}</Answer>
      </section>
      {results.data && (
        <>
          <Checks study={study} summary={results.data} />
          <Lineage study={study} summary={results.data} />
        </>
      )}
    </>
  )
}
function Key({ study, progress, summary: found }: { study: Study; progress: Progress | null; summary: Summary }) {
  const row = found.holdout.find((each) => each.trial === found.holdout_reference)
  const steps = stepsOf(progress)
  const rows = [
    {
      term: 'best trial, on held-out data',
      value: row?.mean ? <Interval of={row.mean} /> : found.best ? `trial ${found.best.trial}` : 'none yet',
      note: row ? heldOutNote(row) : found.best ? 'not scored on held-out data' : undefined,
    },
    {
      term: 'trials',
      value: count(Object.values(study.trials).reduce((a, b) => a + b, 0)),
      note: Object.entries(study.trials)
        .map(([state, n]) => `${count(n)} ${state.toLowerCase()}`)
        .join(', '),
    },
    ...(steps ? [{ term: 'steps', value: count(steps.made), note: `of ${count(steps.planned)} expected` }] : []),
    {
      term: 'samples scored',
      value: count(progress?.samples_scored ?? found.samples.scored),
      note: found.samples.saved === null ? undefined : `${percent(found.samples.saved)} of full evaluation saved`,
    },
    {
      term: 'time',
      value: duration(study.wall_clock_s),
      note:
        study.state === 'RUNNING' && progress?.time_left_s
          ? `about ${duration(progress.time_left_s)} left`
          : study.algorithm,
    },
  ]
  return <Figures rows={rows} />
}

function heldOutNote(row: Summary['holdout'][number]): string {
  const values = Object.entries(row.values).map(([name, estimate]) => `${name} ${value(estimate.value)}`)
  return `trial ${row.trial}${row.mean ? ', mean' : ''}: ${values.join(', ')}`
}

/** Whether the checks at the end of the page found anything, so that nobody has to look there for it. */
function Careful({ summary: found }: { summary: Summary }) {
  const overlaps = found.contamination.filter((each) => each.overlapping > 0).length
  const number =
    overlaps +
    [found.warnings, found.failures, found.invalid, found.holdout_failures].filter((each) => each.length > 0).length
  return (
    <p>
      {verified(found.verification)}.{' '}
      <a href="#checks">{number === 0 ? 'All checks' : `⚠ ${number} more to look at`}</a>
    </p>
  )
}
