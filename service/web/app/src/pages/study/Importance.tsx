import { useCallback, useState } from 'react'
import type { components } from '../../api/schema'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Palette, axis } from '../../charts/palette'
import { type Hold, useHold } from '../../charts/useHold'
import { count, value } from '../../format'
import { Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'

type Plot = components['schemas']['ImportancePlot']

interface Bar {
  name: string
  importance: number
}

// Bars of the chart; its table has all.
const MAX_BARS = 20

const GROUPS = [
  { value: 'parameters', label: 'by parameter' },
  { value: 'layers', label: 'summed by layers' },
  { value: 'parts', label: 'summed by part of a layer' },
  { value: 'experts', label: 'summed by expert' },
] as const
type Group = (typeof GROUPS)[number]['value']

/** How much each parameter decides whether a trial is among the best tenth, also summed by layers, part and expert. */
export function Importance({ plot: latest }: { plot: Plot }) {
  const [plot, hold] = useHold(latest, { key: latest.objective, count: ({ trials }) => trials })
  const [group, setGroup] = useState<Group>('parameters')
  if (plot.parameters === null) return <Nothing>No importances: {plot.reason}.</Nothing>
  const bars: Record<Group, Bar[]> = {
    parameters: plot.parameters,
    layers: plot.layers,
    parts: plot.parts,
    experts: plot.experts,
  }
  const given = GROUPS.filter((each) => bars[each.value].length > 0)
  const shown = given.some((each) => each.value === group) ? group : 'parameters'
  return (
    <>
      <div className="row">
        <Choose label="Bars" options={given} value={shown} onChange={(chosen) => setGroup(chosen as Group)} />
      </div>
      <Bars
        bars={bars[shown]}
        hold={hold}
        label={`Importance for ${plot.objective} ${GROUPS.find((g) => g.value === shown)!.label}`}
      />
      <p className="soft">
        PED-ANOVA over {count(plot.used)} {plot.used < plot.trials && `of ${count(plot.trials)} `}trials at full budget:
        how much a parameter decides whether a trial is among the best tenth. All parameters sum to 1.
      </p>
    </>
  )
}

function Bars({ bars, label, hold }: { bars: Bar[]; label: string; hold: Hold }) {
  const shown = bars.slice(0, MAX_BARS)
  const names = JSON.stringify(shown)
  const option = useCallback(
    (p: Palette, isNarrow: boolean) => {
      const rows = (JSON.parse(names) as Bar[]).toReversed()
      return {
        grid: { left: 8, right: 52, top: 4, bottom: 40, containLabel: true },
        tooltip: {
          trigger: 'item',
          confine: true,
          formatter: ({ name, value: of }: { name: string; value: number }) => `${escaped(name)}: ${value(of)}`,
        },
        xAxis: axis(p, 'importance', { scale: false, splitNumber: 4 }),
        yAxis: {
          type: 'category',
          data: rows.map((row) => row.name),
          axisLabel: { color: p.soft, width: isNarrow ? 110 : 230, overflow: 'truncate' },
          axisLine: { show: false },
          axisTick: { show: false },
        },
        series: [
          {
            type: 'bar',
            barMaxWidth: 14,
            itemStyle: { color: p.accent },
            label: {
              show: true,
              position: 'right',
              color: p.soft,
              formatter: ({ value: of }: { value: number }) => value(of),
            },
            data: rows.map((row) => row.importance),
          },
        ],
      }
    },
    [names],
  )
  const first = bars[0]
  return (
    <EChart
      label={label}
      describe={first ? `Most important: ${first.name} with ${value(first.importance)}.` : ''}
      option={option}
      hold={hold}
      height={60 + 20 * shown.length}
      table={() => ({ head: ['name', 'importance'], rows: bars.map((bar) => [bar.name, value(bar.importance)]) })}
    />
  )
}
