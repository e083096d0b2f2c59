import { useInfiniteQuery, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useCallback, useMemo } from 'react'
import { api } from '../../api/client'
import { pareto, trial as trialQuery } from '../../api/queries'
import { type Split, samples } from '../../api/samples'
import type { components } from '../../api/schema'
import type { Objective, Summary, Trial } from '../../api/types'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import type { Palette } from '../../charts/palette'
import { count, ownLabel, signed, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Difference, Interval } from '../../parts/Interval'
import { WithError } from '../../parts/WithError'
import { type Cell, differences, lastWord } from '../../recipes'
import { useStudy } from './StudyLayout'

type Series = components['schemas']['CoefficientsPlot']

/** Two trials: values by objective with paired differences, and the differences of their recipes' coefficients. */
export function CompareTrials({ a, b, summary }: { a: number; b: number; summary: Summary }) {
  const { study } = useStudy()
  const objectives = useQuery(pareto(study.id))
  const first = useQuery(trialQuery(study.id, a))
  const second = useQuery(trialQuery(study.id, b))
  return (
    <Answer of={first}>
      {(one) => (
        <Answer of={second}>
          {(two) => (
            <Answer of={objectives}>
              {(front) => (
                <>
                  <Values objectives={front.objectives} trials={[one, two]} summary={summary} />
                  <Recipes a={a} b={b} />
                </>
              )}
            </Answer>
          )}
        </Answer>
      )}
    </Answer>
  )
}

function Values(props: { objectives: Objective[]; trials: [Trial, Trial]; summary: Summary }) {
  const { objectives, trials, summary } = props
  const { study } = useStudy()
  const [a, b] = trials
  return (
    <>
      <h3>Values</h3>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Values of the two trials">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                objective
              </th>
              {trials.map((trial, k) => (
                // oxlint-disable-next-line react/no-array-index-key
                <th key={k} scope="col">
                  <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${trial.number}` }}>
                    trial {trial.number}
                  </Link>{' '}
                  {ownLabel(trial.number, trial.label)}
                </th>
              ))}
              <th scope="col">
                trial {a.number} minus trial {b.number}
              </th>
              <th scope="col" className="l">
                data
              </th>
              <th scope="col" className="l">
                samples
              </th>
            </tr>
          </thead>
          <tbody>
            {objectives.map((objective) => (
              <ValueRow key={objective.name} objective={objective} trials={trials} summary={summary} />
            ))}
          </tbody>
        </table>
      </div>
      <p className="soft">
        Differences are paired by sample, with 95 % intervals; they are on held-out data if both trials were scored on
        it, and otherwise on the samples of the search that both trials have.
      </p>
    </>
  )
}

function ValueRow(props: { objective: Objective; trials: [Trial, Trial]; summary: Summary }) {
  const { objective, trials, summary } = props
  const { name, direction } = objective
  const [a, b] = trials
  const isHeldOut = trials.every((trial) =>
    summary.holdout.some((row) => row.trial === trial.number && row.values[name] !== undefined),
  )
  const split: Split = isHeldOut ? 'holdout' : 'search'
  const { study } = useStudy()
  const hasSamples = trials.every((trial) => (trial.rungs.at(-1)?.samples[name] ?? 0) > 0)
  const chosen = { objective: name, split, against: b.number, limit: 1 }
  // No difference of other trials under the numbers of these while it is loaded.
  const paired = useInfiniteQuery({
    ...samples(study.id, a.number, chosen),
    enabled: hasSamples,
    placeholderData: undefined,
  })
  const difference = paired.data?.pages[0]?.difference
  return (
    <tr>
      <th scope="row" className="l">
        {name} <small>{direction === 'minimize' ? 'smaller is better' : 'larger is better'}</small>
      </th>
      {trials.map((trial, k) => (
        // oxlint-disable-next-line react/no-array-index-key
        <td key={k}>
          <OwnValue trial={trial} name={name} summary={summary} isHeldOut={isHeldOut} />
        </td>
      ))}
      <td>
        {paired.isError ? paired.error.message : <Difference of={difference ?? undefined} />}
        {paired.isSuccess && !difference && <span className="soft">none: no sample is stored for both</span>}
      </td>
      <td className="l">{isHeldOut ? 'held-out' : 'search'}</td>
      <td className="l">
        {hasSamples && (
          <Link
            to="/studies/$id/trials/$number/samples"
            params={{ id: study.id, number: `${a.number}` }}
            search={{ objective: name, split, against: `${b.number}` }}
            aria-label={`side by side: samples of ${name}`}
          >
            side by side
          </Link>
        )}
      </td>
    </tr>
  )
}

function OwnValue(props: { trial: Trial; name: string; summary: Summary; isHeldOut: boolean }) {
  const { trial, name, summary, isHeldOut } = props
  const held = summary.holdout.find((row) => row.trial === trial.number)?.values[name]
  if (isHeldOut && held) return <Interval of={held} />
  const last = trial.rungs.at(-1)
  const error = last?.standard_errors[name]
  if (last?.values[name] === undefined) return <span className="soft">not scored</span>
  return (
    <span title={`${count(last.samples[name] ?? 0)} samples`}>
      <WithError value={last.values[name]} error={error} />
    </span>
  )
}

const coefficients = (id: string, number: number) => ({
  queryKey: ['study', id, 'trial', number, 'plots', 'coefficients'],
  queryFn: async ({ signal }: { signal: AbortSignal }) => {
    const path = '/v1/studies/{study_id}/trials/{number}/plots/{name}'
    const params = { path: { study_id: id, number, name: 'coefficients' as const } }
    return (await api.GET(path, { params, signal })).data as Series
  },
})

/** The differences of the coefficients of two recipes, by layer, component and expert. */
function Recipes({ a, b }: { a: number; b: number }) {
  const { study } = useStudy()
  const first = useQuery(coefficients(study.id, a))
  const second = useQuery(coefficients(study.id, b))
  return (
    <>
      <h3>Recipes</h3>
      <Answer of={first}>
        {(one) => <Answer of={second}>{(two) => <HeatMap a={a} b={b} series={[one, two]} />}</Answer>}
      </Answer>
    </>
  )
}

function HeatMap({ a, b, series }: { a: number; b: number; series: [Series, Series] }) {
  const found = useMemo(() => differences(series[0].values, series[1].values), [series])
  const { cells, across, up } = found
  const known = useMemo(() => cells.filter((cell) => cell.difference !== null), [cells])
  const most = known.reduce((top, cell) => Math.max(top, Math.abs(cell.difference!)), 0)
  const say = useCallback(
    (cell: Cell, safe = (text: string) => text) =>
      `${safe(cell.row)}, ${safe(placeWords(cell.column))}: ${signed(cell.difference ?? 0)} (${value(cell.a)} and ${value(cell.b)})`,
    [],
  )
  const option = useCallback(
    (p: Palette, isNarrow: boolean) => ({
      grid: { left: isNarrow ? 102 : 150, right: 16, top: 8, bottom: 70 },
      tooltip: {
        trigger: 'item',
        confine: true,
        formatter: ({ dataIndex }: { dataIndex: number }) => say(known[dataIndex]!, escaped),
      },
      xAxis: {
        type: 'category',
        data: across,
        name: 'layer',
        nameLocation: 'middle',
        nameGap: 26,
        nameTextStyle: { color: p.soft },
        axisLabel: { color: p.soft, interval: 0, hideOverlap: true, formatter: lastWord },
        axisLine: { show: false },
        axisTick: { show: false },
      },
      yAxis: {
        type: 'category',
        inverse: true,
        data: up,
        axisLabel: { color: p.soft, width: isNarrow ? 92 : 140, overflow: 'truncate' },
        axisLine: { show: false },
        axisTick: { show: false },
      },
      visualMap: {
        min: -(most || 1),
        max: most || 1,
        precision: 2,
        orient: 'horizontal',
        left: 'center',
        bottom: 0,
        itemWidth: 12,
        itemHeight: 110,
        text: [`trial ${a}`, `trial ${b}`],
        textStyle: { color: p.soft },
        inRange: { color: [...p.diverging] },
      },
      series: [
        {
          type: 'heatmap',
          data: known.map((cell) => [across.indexOf(cell.column), up.indexOf(cell.row), cell.difference]),
          itemStyle: { borderColor: p.rule, borderWidth: 1 },
        },
      ],
    }),
    [known, across, up, most, a, b, say],
  )
  const points = useMemo(
    () =>
      known
        .map((cell, index) => ({ series: 0, index, text: say(cell), size: Math.abs(cell.difference!) }))
        .toSorted((one, two) => two.size - one.size),
    [known, say],
  )
  if (cells.length === 0)
    return <Nothing>Neither recipe has coefficients by layer, so there is no difference to draw.</Nothing>
  if (known.length === 0) return <Nothing>The recipes have no coefficient in common.</Nothing>
  const largest = points[0]!
  return (
    <>
      <EChart
        label={`Coefficients of trial ${a} minus those of trial ${b}`}
        describe={most > 0 ? `Largest difference: ${largest.text}.` : 'All coefficients are equal.'}
        option={option}
        points={points}
        height={100 + 22 * up.length}
        table={() => ({
          head: ['expert and component', 'layer', `trial ${a}`, `trial ${b}`, 'difference'],
          rows: cells.map((cell) => [
            cell.row,
            cell.column,
            cell.a === null ? 'none' : value(cell.a),
            cell.b === null ? 'none' : value(cell.b),
            cell.difference === null ? '' : signed(cell.difference),
          ]),
        })}
      />
      <p className="soft">
        A place has the colour of the trial whose coefficient is larger: at the ends of the scale, the difference is{' '}
        {value(most)}.
      </p>
      {known.length < cells.length && (
        <p className="soft">
          {count(cells.length - known.length)} coefficients that only one of the recipes has are in the table alone.
        </p>
      )}
    </>
  )
}

const placeWords = (column: string) => (/^\d+$/.test(column) ? `layer ${column}` : column)
