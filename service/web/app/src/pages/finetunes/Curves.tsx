import { useQuery } from '@tanstack/react-query'
import { useCallback, useMemo } from 'react'
import { curves as curvesQuery } from '../../api/queries'
import type { Curves as CurvesOfExperts, Finetune } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { useHold } from '../../charts/useHold'
import { escaped } from '../../charts/escaped'
import { type Palette, axis } from '../../charts/palette'
import { count, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { type Line, lossLines, nameOf, valueLines } from './lines'

// Lines of more experts than there are colours differ in their dashes, and all of them in their marks.
const DASHES = ['solid', 'dashed', 'dotted'] as const
// The second line of an expert, which the experts' dashes are not.
const SECOND = [8, 3, 2, 3]
const MARKS = ['circle', 'rect', 'triangle', 'diamond'] as const
const MAX_MARKED = 60

/** Training losses and evaluations of each expert over its updates. */
export function Curves({ finetune }: { finetune: Finetune }) {
  const query = useQuery(curvesQuery(finetune.id))
  return <Answer of={query}>{({ experts }) => <Charts experts={experts} />}</Answer>
}

function Charts({ experts }: { experts: CurvesOfExperts['experts'] }) {
  const losses = useMemo(() => lossLines(experts), [experts])
  const names = [...new Set(experts.flatMap(({ evaluations }) => evaluations.flatMap((p) => Object.keys(p.values))))]
  return (
    <>
      <section aria-labelledby="loss">
        <h2 id="loss">Training loss</h2>
        {losses.every(({ points }) => points.length === 0) ? (
          <Nothing>No update yet.</Nothing>
        ) : (
          <>
            <LineChart label="Mean loss on the training data since the point before" name="loss" lines={losses} />
            {losses.some(({ at }) => at !== undefined) && (
              <p className="soft">
                At the offset: with the method mergopt, at the weights that a merge may reach, and with sam and asam,
                where the loss is highest nearby. Losses at the weights are comparable between methods.
              </p>
            )}
          </>
        )}
      </section>
      <section aria-labelledby="evaluations">
        <h2 id="evaluations">Evaluations</h2>
        {names.length === 0 && <Nothing>No expert has been evaluated.</Nothing>}
        <div className={names.length > 1 ? 'halves' : ''}>
          {names.map((name) => (
            <Evaluation key={name} name={name} experts={experts} />
          ))}
        </div>
      </section>
    </>
  )
}

function Evaluation({ name, experts }: { name: string; experts: CurvesOfExperts['experts'] }) {
  const lines = useMemo(() => valueLines(name, experts), [name, experts])
  return <LineChart label={`${name} of each expert`} name={name} lines={lines} />
}

function LineChart({ label, name, lines: latest }: { label: string; name: string; lines: Line[] }) {
  const [lines, hold] = useHold(latest)
  const option = useCallback(
    (p: Palette) => ({
      grid: { left: 56, right: 16, top: 30, bottom: 42 },
      legend: { top: 0, type: 'scroll', textStyle: { color: p.soft }, pageTextStyle: { color: p.soft } },
      tooltip: {
        trigger: 'item',
        confine: true,
        formatter: ({ seriesName, data }: { seriesName: string; data: [number, number] }) =>
          `${escaped(seriesName)}: ${escaped(name)} ${value(data[1])} at update ${count(data[0])}`,
      },
      xAxis: axis(p, 'update', { scale: false, splitLine: { show: false }, minInterval: 1 }),
      yAxis: axis(p, name, { nameGap: 42 }),
      series: lines.map(({ index: k, points, isSecond, ...line }) => {
        const color = p.experts[k % p.experts.length]!
        return {
          type: 'line',
          name: nameOf(line),
          data: points,
          symbol: MARKS[k % MARKS.length],
          symbolSize: 6,
          showSymbol: points.length <= MAX_MARKED,
          lineStyle: {
            color,
            width: 1.5,
            type: isSecond ? SECOND : DASHES[Math.floor(k / p.experts.length) % DASHES.length],
          },
          itemStyle: { color },
        }
      }),
    }),
    [name, lines],
  )
  const last = lines.flatMap(({ points, ...line }, series) => {
    const point = points.at(-1)
    if (point === undefined) return []
    const text = `${nameOf(line)}: ${name} ${value(point[1])} at update ${count(point[0])}`
    return [{ series, index: points.length - 1, text }]
  })
  return (
    <EChart
      label={label}
      describe={last.map(({ text }) => `${text}.`).join(' ')}
      option={option}
      hold={hold}
      height={280}
      points={last}
      table={() => ({
        head: ['expert', 'update', name],
        rows: lines.flatMap(({ points, ...line }) => points.map(([step, x]) => [nameOf(line), count(step), value(x)])),
        more: 'The curves in the API have all of them.',
      })}
    />
  )
}
