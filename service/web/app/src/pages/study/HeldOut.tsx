import { Link } from '@tanstack/react-router'
import { useCallback, useMemo, useState } from 'react'
import type { Estimate, Objective, Study, Summary } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { type Hold, useHold } from '../../charts/useHold'
import { drawInterval } from '../../charts/intervals'
import { type Palette, axis } from '../../charts/palette'
import { interval, value } from '../../format'
import { Nothing } from '../../parts/Answer'
import { ChooseObjective } from '../../parts/Choose'
import { Difference, Interval } from '../../parts/Interval'
import { noHoldout } from '../../parts/noHoldout'

type Row = Summary['holdout'][number]
const MEAN = 'mean'

/** Estimates on held-out data with 95 % intervals: as a forest plot and as a table. */
export function HeldOut({ study, summary }: { study: Study; summary: Summary }) {
  const { objectives } = study
  const [{ holdout: rows, holdout_reference: reference }, hold] = useHold(summary, {
    key: `${summary.holdout.length > 0}`,
    count: ({ holdout }) => holdout.length,
  })
  const hasMean = rows.some((row) => row.mean !== null)
  const names = [...(hasMean ? [MEAN] : []), ...objectives.map((each) => each.name)]
  const [chosen, setChosen] = useState<string>()
  const name = chosen ?? names[0]!
  const isLess = objectives.find((each) => each.name === name)?.direction === 'minimize'
  const shown = useMemo(() => {
    const found = rows.flatMap((row) => {
      const estimate = name === MEAN ? row.mean : row.values[name]
      return estimate ? [{ row, estimate }] : []
    })
    return found.toSorted((a, b) => (isLess ? 1 : -1) * (a.estimate.value - b.estimate.value))
  }, [rows, name, isLess])
  return (
    <>
      {rows.length === 0 ? (
        <Nothing>{noHoldout(study, summary)}</Nothing>
      ) : (
        <>
          <ChooseObjective names={names} value={name} onChange={setChosen} />
          <Forest name={name} shown={shown} reference={reference} hold={hold} />
          <HeldOutTable
            study={study}
            rows={shown.map(({ row }) => row)}
            objectives={objectives}
            reference={reference}
            name={name}
          />
          <Bias summary={summary} />
        </>
      )}
    </>
  )
}

function labelOf({ label, trial, origin }: Row): string {
  return origin === 'search' || origin === 'refined' ? `trial ${trial}` : label
}

type Shown = { row: Row; estimate: Estimate }[]

function Forest(props: { name: string; shown: Shown; reference: number | null; hold: Hold }) {
  const { name, shown, reference, hold } = props
  const option = useCallback(
    (p: Palette, isNarrow: boolean) => {
      const color = (row: Row) =>
        row.trial === reference ? p.accent : row.origin === 'source' || row.origin === 'published' ? p.warm : p.soft
      const rows = shown.toReversed() // the best is at the top
      return {
        grid: { left: isNarrow ? 112 : 160, right: 24, top: 8, bottom: 42 },
        tooltip: { trigger: 'item', formatter: ({ value: at }: { value: number[] }) => interval(at[2]!, at[3]!) },
        xAxis: axis(p, `${name} on held-out data`),
        yAxis: {
          type: 'category',
          data: rows.map(({ row }) => labelOf(row)),
          axisLabel: { color: p.soft, width: isNarrow ? 100 : 145, overflow: 'truncate' },
          axisLine: { show: false },
          axisTick: { show: false },
        },
        series: [
          {
            type: 'custom',
            data: rows.map(({ estimate, row }, k) => ({
              value: [estimate.value, k, estimate.ci95[0], estimate.ci95[1]],
              itemStyle: { color: color(row) },
            })),
            encode: { x: [0, 2, 3], y: 1 },
            renderItem: drawInterval('x'),
          },
        ],
      }
    },
    [name, shown, reference],
  )
  const best = shown[0]
  return (
    <EChart
      label={`${name} on held-out data, with 95 % intervals`}
      describe={best ? `Best: ${labelOf(best.row)} with ${value(best.estimate.value)}.` : ''}
      option={option}
      hold={hold}
      height={70 + 24 * shown.length}
      table={() => ({
        head: ['trial', 'label', name, '95 % interval', 'samples'],
        rows: shown.map(({ row, estimate }) => [
          row.trial,
          labelOf(row),
          value(estimate.value),
          interval(estimate.ci95[0]!, estimate.ci95[1]!),
          estimate.samples,
        ]),
      })}
    />
  )
}

function HeldOutTable(props: {
  study: Study
  rows: Row[]
  objectives: Objective[]
  reference: number | null
  name: string
}) {
  const { study, rows, objectives, reference, name: chosen } = props
  const hasMean = rows.some((row) => row.mean !== null)
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Values on held-out data">
      <table className="data">
        <thead>
          <tr>
            <th scope="col">trial</th>
            <th scope="col" className="l">
              label
            </th>
            {objectives.map(({ name }) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
            {hasMean && <th scope="col">mean</th>}
            <th scope="col">
              {chosen} minus trial {reference}
            </th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.trial}>
              <th scope="row">
                <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${row.trial}` }}>
                  {row.trial}
                </Link>
              </th>
              <td className="l">{row.label}</td>
              {objectives.map(({ name }) => (
                <td key={name}>
                  <Interval of={row.values[name]} />
                </td>
              ))}
              {hasMean && (
                <td>
                  <Interval of={row.mean ?? undefined} />
                </td>
              )}
              <td>{row.trial !== reference && <Difference of={row.differences[chosen]} />}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

/** How much the search has overestimated its best trial, and how much easier its data are than the held-out data. */
function Bias({ summary }: { summary: Summary }) {
  const { selection_bias_against_baselines: biases, split_difference: splits } = summary
  const name = biases[MEAN] ? MEAN : Object.keys(biases)[0]
  if (name === undefined) return null
  return (
    <p>
      Selection bias ({name}): <Difference of={biases[name]} />
      {splits[name] && (
        <>
          ; difference of the data: <Difference of={splits[name]} />
        </>
      )}
      . The bias is by how much the best trial&apos;s lead over the baselines is larger on the data of the search than
      on held-out data. The difference of the data is that of the baselines.
    </p>
  )
}
