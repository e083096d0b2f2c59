import { useCallback, useMemo } from 'react'
import type { CoefficientsPlot } from '../../api/types'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Palette, usePalette } from '../../charts/palette'
import { value } from '../../format'
import { Nothing } from '../../parts/Answer'
import { lastWord, rowOf } from '../../recipes'

type Coefficient = CoefficientsPlot['values'][number]

// Panels of more experts than this are not drawn.
const MAX_EXPERTS = 16
const MAX_HEIGHT = 560
const ROW_PX = 16

/** The coefficients of each expert by layer and component: a heat map for each expert, diverging around 0. */
export function Coefficients({ plot }: { plot: CoefficientsPlot }) {
  const { values } = plot
  const experts = useMemo(() => [...new Set(values.map((each) => each.expert))], [values])
  const largest = useMemo(() => Math.max(...values.map((each) => Math.abs(each.value))) || 1, [values])
  if (!values.some((each) => each.layer !== null))
    return (
      <Nothing>
        The merge has no factor of each expert&apos;s task vector by layer. The recipe shows what it has instead.
      </Nothing>
    )
  if (values.every((each) => each.value === 0))
    return <Nothing>The merge has no part of any task vector: all coefficients are 0.</Nothing>
  return (
    <>
      <Scale largest={largest} />
      <div className="panels">
        {experts.slice(0, MAX_EXPERTS).map((expert) => (
          <Panel key={expert} expert={expert} values={values} largest={largest} />
        ))}
      </div>
      {experts.length > MAX_EXPERTS && (
        <p className="soft">
          The first {MAX_EXPERTS} of {experts.length} experts. The configuration has all coefficients.
        </p>
      )}
    </>
  )
}

/** The colours of the smallest and the largest coefficient, and of 0. */
function Scale({ largest }: { largest: number }) {
  const { diverging, rule } = usePalette()
  return (
    <p className="row soft">
      {value(-largest)}
      <span
        aria-hidden="true"
        style={{
          width: 160,
          height: 10,
          border: `1px solid ${rule}`,
          background: `linear-gradient(to right, ${diverging.join(', ')})`,
        }}
      />
      {value(largest)}, factors on task vectors; 0 has the colour of the paper
    </p>
  )
}

/** One expert's coefficients: a row for each layer, and for each part outside of the layers, such as the embedding. */
function Panel({ expert, values, largest }: { expert: string; values: Coefficient[]; largest: number }) {
  const own = useMemo(() => values.filter((each) => each.expert === expert), [values, expert])
  const columns = useMemo(() => columnsOf(own), [own])
  const rows = useMemo(() => [...new Set(own.map(rowOf))], [own])
  const cells = useMemo(
    () =>
      own.flatMap((each) => {
        const at = each.layer === null ? columns.map((_, k) => k) : [columns.indexOf(each.part)]
        return at.map((column) => ({ of: each, data: [column, rows.indexOf(rowOf(each)), each.value] }))
      }),
    [own, columns, rows],
  )
  // Room for the names of columns, which are slanted: those of tensors are longer than those of components.
  const below = columns.length === 1 ? 10 : columns.every((part) => part.length <= 10) ? 44 : 72
  const option = useCallback(
    (p: Palette) => {
      const category = { type: 'category', axisTick: { show: false }, axisLine: { lineStyle: { color: p.rule } } }
      return {
        grid: { left: 96, right: 6, top: 4, bottom: below },
        tooltip: {
          confine: true,
          formatter: ({ dataIndex }: { dataIndex: number }) => escaped(say(cells[dataIndex]!.of)),
        },
        xAxis: {
          ...category,
          data: columns.map(lastWord),
          axisLabel: {
            show: columns.length > 1,
            color: p.soft,
            rotate: 35,
            interval: 0,
            width: 110,
            overflow: 'truncate',
          },
        },
        yAxis: {
          ...category,
          data: rows,
          inverse: true,
          axisLabel: { color: p.soft, width: 88, overflow: 'truncate', formatter: lastWord },
        },
        visualMap: { show: false, min: -largest, max: largest, inRange: { color: [...p.diverging] } },
        series: [
          {
            type: 'heatmap',
            itemStyle: { borderColor: p.rule, borderWidth: 1 },
            emphasis: { itemStyle: { borderColor: p.ink } },
            data: cells.map(({ data }) => data),
          },
        ],
      }
    },
    [cells, columns, rows, largest, below],
  )
  const points = useMemo(() => cells.map(({ of }, index) => ({ series: 0, index, text: say(of) })), [cells])
  const found = own.map((each) => each.value)
  return (
    <EChart
      label={expert}
      describe={`Coefficients of ${expert} by layer: from ${value(Math.min(...found))} to ${value(Math.max(...found))}.`}
      option={option}
      points={points}
      height={Math.min(MAX_HEIGHT, ROW_PX * rows.length + 4 + below)}
      table={() => ({
        head: ['layer', 'part', 'coefficient'],
        rows: own.map((each) => [each.layer ?? '', each.part, value(each.value)]),
      })}
    />
  )
}

const COMPONENTS = ['attention', 'mlp', 'norm']

/** Parts of layers: components in their usual order, then tensors as they come. */
function columnsOf(values: Coefficient[]): string[] {
  const parts = new Set(values.flatMap((each) => (each.layer === null ? [] : [each.part])))
  return [...COMPONENTS.filter((part) => parts.has(part)), ...[...parts].filter((part) => !COMPONENTS.includes(part))]
}

function say({ expert, layer, part, value: x }: Coefficient): string {
  const where = [layer === null ? '' : `layer ${layer}`, part].filter(Boolean).join(' ')
  return `${expert}, ${where}: ${value(x)}`
}
