import { useQuery } from '@tanstack/react-query'
import { useCallback, useMemo } from 'react'
import { plot } from '../../api/queries'
import type { Study } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { useHold } from '../../charts/useHold'
import { type Palette, axis } from '../../charts/palette'
import { count, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { type PoliciesPlot, type PolicyChart, policyCharts } from './policyCharts'

// The searcher that trains policies.
const TRAINS_POLICIES = 'hm3'

// Lines of more policies than there are colours differ in their dashes.
const DASHES = ['solid', 'dashed', 'dotted'] as const
const MAX_MARKED = 60

/** Outcomes and updates of the policies that a search trains; nothing for a searcher without policies. */
export function Policies({ study }: { study: Study }) {
  const trains = study.algorithm === TRAINS_POLICIES
  const series = useQuery({ ...plot(study.id, 'policies'), enabled: trains })
  if (!trains) return null
  return (
    <section aria-labelledby="policies">
      <h2 id="policies">Policies</h2>
      <Answer of={series}>{(found) => <Charts series={found} />}</Answer>
    </section>
  )
}

function Charts({ series }: { series: PoliciesPlot }) {
  const charts = useMemo(() => policyCharts(series), [series])
  if (charts.length === 0) return <Nothing>No policy has been updated yet.</Nothing>
  return (
    <>
      {charts.map((chart) => (
        <Lines key={chart.name} chart={chart} />
      ))}
    </>
  )
}

function Lines({ chart: latest }: { chart: PolicyChart }) {
  const [{ label, name, lines }, hold] = useHold(latest)
  const option = useCallback(
    (p: Palette) => ({
      grid: { left: 56, right: 16, top: 30, bottom: 42 },
      legend: { top: 0, type: 'scroll', textStyle: { color: p.soft }, pageTextStyle: { color: p.soft } },
      tooltip: {
        trigger: 'item',
        confine: true,
        formatter: ({ seriesName, data }: { seriesName: string; data: [number, number] }) =>
          `${seriesName}: ${name} ${value(data[1])} in iteration ${count(data[0])}`,
      },
      xAxis: axis(p, 'iteration of a policy', { scale: false, splitLine: { show: false }, minInterval: 1 }),
      yAxis: axis(p, name, { nameGap: 42, scale: false }),
      series: lines.map(({ policy, points }, k) => {
        const color = p.experts[k % p.experts.length]!
        return {
          type: 'line',
          name: policy,
          data: points,
          symbolSize: 5,
          showSymbol: points.length <= MAX_MARKED,
          lineStyle: { color, width: 1.5, type: DASHES[Math.floor(k / p.experts.length) % DASHES.length] },
          itemStyle: { color },
        }
      }),
    }),
    [name, lines],
  )
  const last = lines.flatMap(({ policy, points }, index) => {
    const point = points.at(-1)
    if (point === undefined) return []
    const text = `${policy}: ${name} ${value(point[1])} in iteration ${count(point[0])}`
    return [{ series: index, index: points.length - 1, text }]
  })
  return (
    <EChart
      label={label}
      describe={last.map(({ text }) => `${text}.`).join(' ')}
      option={option}
      hold={hold}
      height={240}
      points={last}
      table={() => ({
        head: ['policy', 'iteration', name],
        rows: lines.flatMap(({ policy, points }) => points.map(([turn, x]) => [policy, count(turn), value(x)])),
        more: 'The plot in the API has all of them.',
      })}
    />
  )
}
