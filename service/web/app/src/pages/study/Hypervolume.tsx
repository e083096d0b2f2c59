import { useQuery } from '@tanstack/react-query'
import { useCallback } from 'react'
import { plot } from '../../api/queries'
import type { Study } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { useHold } from '../../charts/useHold'
import { type Palette, axis } from '../../charts/palette'
import { count, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'

/** Hypervolume of the front over the samples that the search has used. */
export function Hypervolume({ study }: { study: Study }) {
  const series = useQuery(plot(study.id, 'hypervolume'))
  return (
    <section aria-labelledby="hypervolume">
      <h2 id="hypervolume">Hypervolume</h2>
      <Answer of={series}>
        {({ points, baselines_spent }) =>
          points.length ? <Chart points={points} baselines={baselines_spent} /> : <Nothing>No front yet.</Nothing>
        }
      </Answer>
    </section>
  )
}

type Points = readonly { trial: number; label: string; origin: string; spent: number; hypervolume: number }[]

function Chart({ points: latest, baselines }: { points: Points; baselines: number }) {
  const [points, hold] = useHold(latest)
  const option = useCallback(
    (p: Palette) => ({
      grid: { left: 52, right: 16, top: 22, bottom: 42 },
      tooltip: {
        trigger: 'axis',
        confine: true,
        formatter: ([at]: { data: number[] }[]) =>
          at ? `trial ${at.data[2]}: ${value(at.data[1])} after ${count(at.data[0]!)} samples` : '',
      },
      xAxis: axis(p, 'samples used', { scale: false, splitLine: { show: false } }),
      yAxis: axis(p, 'hypervolume', { nameGap: 38 }),
      series: [
        {
          type: 'line',
          step: 'end',
          symbol: points.length < 200 ? 'circle' : 'none',
          symbolSize: 5,
          lineStyle: { color: p.accent, width: 1.5 },
          itemStyle: { color: p.accent },
          data: points.map((point) => [point.spent, point.hypervolume, point.trial]),
          markLine: {
            silent: true,
            symbol: 'none',
            lineStyle: { color: p.warm, type: 'dashed' },
            label: { color: p.soft, formatter: 'baselines scored' },
            data: [{ xAxis: baselines }],
          },
        },
      ],
    }),
    [points, baselines],
  )
  const last = points.at(-1)!
  return (
    <EChart
      label="Hypervolume of the Pareto front on search data"
      describe={`${value(last.hypervolume)} after ${count(last.spent)} samples.`}
      option={option}
      hold={hold}
      height={240}
      table={() => ({
        head: ['trial', 'label', 'samples used', 'hypervolume'],
        rows: points.map((point) => [point.trial, point.label, count(point.spent), value(point.hypervolume)]),
      })}
    />
  )
}
