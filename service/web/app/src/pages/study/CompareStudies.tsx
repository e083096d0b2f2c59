import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useCallback, useMemo, useState } from 'react'
import { columns, plot, study as studyQuery, summary as summaryQuery } from '../../api/queries'
import type { components } from '../../api/schema'
import type { Columns, Study, Summary } from '../../api/types'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Palette, axis } from '../../charts/palette'
import { count, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { ChooseObjective } from '../../parts/Choose'
import { Interval } from '../../parts/Interval'

type Series = components['schemas']['HistorySeries']
type Own = { study: Study; series: Series[]; trials: Columns }

/** The best trials of two studies: over the samples that each has spent, and on held-out data. */
export function CompareStudies(props: { study: Study; summary: Summary; other: string }) {
  const { study, summary, other } = props
  const found = useQuery(studyQuery(other))
  const theirs = useQuery(summaryQuery(other))
  const histories = [useQuery(plot(study.id, 'history')), useQuery(plot(other, 'history'))] as const
  const fields = 'number,samples_scored'
  const spent = [useQuery(columns(study.id, fields)), useQuery(columns(other, fields))] as const
  return (
    <Answer of={found}>
      {(second) => (
        <>
          <Answer of={histories[0]}>
            {(one) => (
              <Answer of={histories[1]}>
                {(two) => (
                  <Answer of={spent[0]}>
                    {(first) => (
                      <Answer of={spent[1]}>
                        {(last) => (
                          <Histories
                            a={{ study, series: one.series, trials: first.columns }}
                            b={{ study: second, series: two.series, trials: last.columns }}
                          />
                        )}
                      </Answer>
                    )}
                  </Answer>
                )}
              </Answer>
            )}
          </Answer>
          <Answer of={theirs}>
            {(own) => (
              <HeldOutValues
                rows={[
                  [study, summary],
                  [second, own],
                ]}
              />
            )}
          </Answer>
        </>
      )}
    </Answer>
  )
}

interface Step {
  spent: number
  value: number
  trial: number
}

/** The trials that were the best so far, with the samples that the study had scored until then; and its last state. */
function steps({ series, trials }: Own, name: string): Step[] {
  const record = series.find((each) => each.name === name)?.record ?? []
  const upTo = new Map<number, number>()
  let spent = 0
  trials.number!.forEach((number, k) => {
    spent += (trials.samples_scored![k] as number | null) ?? 0
    upTo.set(number as number, spent)
  })
  const found = record.map((point) => ({ ...point, spent: upTo.get(point.trial) ?? 0 }))
  const last = found.at(-1)
  return last && last.spent < spent ? [...found, { ...last, spent }] : found
}

function Histories({ a, b }: { a: Own; b: Own }) {
  const names = useMemo(
    () => a.series.map(({ name }) => name).filter((name) => b.series.some((each) => each.name === name)),
    [a, b],
  )
  const [chosen, setChosen] = useState<string>()
  const name = chosen ?? names[0] ?? ''
  const lines = useMemo(() => [a, b].map((own) => ({ own, found: steps(own, name) })), [a, b, name])
  const option = useCallback(
    (p: Palette) => ({
      grid: { left: 52, right: 16, top: 34, bottom: 42 },
      legend: { top: 0, left: 0, textStyle: { color: p.soft }, selectedMode: false, itemWidth: 34 },
      tooltip: {
        trigger: 'item',
        confine: true,
        formatter: ({ data, seriesName }: { data: number[]; seriesName: string }) =>
          `${escaped(seriesName)}, trial ${data[2]}: ${value(data[1])} after ${count(data[0]!)} samples`,
      },
      xAxis: axis(p, 'samples scored', {
        scale: false,
        splitLine: { show: false },
      }),
      yAxis: axis(p, name, { nameGap: 38 }),
      series: lines.map(({ own, found }, k) => ({
        type: 'line',
        name: label(own.study, k),
        step: 'end',
        symbol: k === 0 ? 'circle' : 'rect',
        symbolSize: 6,
        lineStyle: { color: k === 0 ? p.accent : p.warm, width: 1.5, type: k === 0 ? 'solid' : 'dashed' },
        itemStyle: { color: k === 0 ? p.accent : p.warm },
        data: found.map((step) => [step.spent, step.value, step.trial]),
      })),
    }),
    [lines, name],
  )
  if (names.length === 0) return <Nothing>The two studies have no objective with the same name.</Nothing>
  return (
    <>
      <h3>Best so far</h3>
      <ChooseObjective names={names} value={name} onChange={setChosen} />
      {lines.every(({ found }) => found.length === 0) ? (
        <Nothing>No trial of either study has reached the full budget yet.</Nothing>
      ) : (
        <EChart
          label={`Best ${name} at full budget over the samples scored`}
          describe={lines.map(({ own, found }, k) => sentence(label(own.study, k), found.at(-1))).join(' ')}
          option={option}
          height={280}
          table={() => ({
            head: ['study', 'trial', 'samples scored', name],
            rows: lines.flatMap(({ own, found }, k) =>
              found.map((step) => [label(own.study, k), step.trial, count(step.spent), value(step.value)]),
            ),
          })}
        />
      )}
      <p className="soft">
        Values are on the data of the search, which overestimate the best trial. They are comparable only if both
        studies use the same tasks and numbers of samples.
      </p>
    </>
  )
}

const label = (study: Study, k: number) => `${study.name} (${k === 0 ? 'this study' : study.id.slice(0, 8)})`

const sentence = (name: string, last: Step | undefined) =>
  last ? `${name}: ${value(last.value)} after ${count(last.spent)} samples.` : `${name}: no trial at full budget.`

/** The trial of each study that is the best on search data, on held-out data. */
function HeldOutValues({ rows }: { rows: [Study, Summary][] }) {
  const best = rows.map(([study, { holdout, holdout_reference }]) => ({
    study,
    row: holdout.find((each) => each.trial === holdout_reference),
  }))
  const names = [...new Set(best.flatMap(({ row }) => Object.keys(row?.values ?? {})))]
  return (
    <>
      <h3>Held-out data</h3>
      {names.length === 0 ? (
        <Nothing>Neither study has values on held-out data.</Nothing>
      ) : (
        // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
        <div className="wide" tabIndex={0} role="region" aria-label="Best trials of both studies on held-out data">
          <table className="data">
            <thead>
              <tr>
                <th scope="col" className="l">
                  study
                </th>
                <th scope="col">trial</th>
                {names.map((name) => (
                  <th key={name} scope="col">
                    {name}
                  </th>
                ))}
                <th scope="col">mean</th>
              </tr>
            </thead>
            <tbody>
              {best.map(({ study, row }, k) => (
                <tr key={study.id}>
                  <th scope="row" className="l">
                    <Link to="/studies/$id" params={{ id: study.id }}>
                      {label(study, k)}
                    </Link>
                  </th>
                  <td>
                    {row ? (
                      <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${row.trial}` }}>
                        {row.trial}
                      </Link>
                    ) : (
                      <span className="soft">none scored</span>
                    )}
                  </td>
                  {names.map((name) => (
                    <td key={name}>
                      <Interval of={row?.values[name]} />
                    </td>
                  ))}
                  <td>
                    <Interval of={row?.mean ?? undefined} />
                  </td>
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
    </>
  )
}
