import { BarChart, CustomChart, HeatmapChart, LineChart, ScatterChart } from 'echarts/charts'
import {
  DataZoomComponent,
  GridComponent,
  LegendComponent,
  MarkAreaComponent,
  MarkLineComponent,
  TooltipComponent,
  VisualMapComponent,
} from 'echarts/components'
import * as echarts from 'echarts/core'
import { CanvasRenderer } from 'echarts/renderers'
import type { EChartsCoreOption } from 'echarts/core'
import { type KeyboardEvent, useEffect, useId, useRef, useState } from 'react'
import { Held } from './Held'
import { type Palette, usePalette } from './palette'
import type { Hold } from './useHold'

echarts.use([
  BarChart,
  ScatterChart,
  LineChart,
  CustomChart,
  HeatmapChart,
  GridComponent,
  LegendComponent,
  TooltipComponent,
  DataZoomComponent,
  MarkAreaComponent,
  MarkLineComponent,
  VisualMapComponent,
  CanvasRenderer,
])

/** A point that the arrow keys reach: its place in the chart, what it says, and its trial. */
export interface ChartPoint {
  series: number
  index: number
  text: string
  trial?: number
}

export interface ChartTable {
  head: string[]
  rows: (string | number)[][]
  /** Where all rows are, if there are too many to show. */
  more?: string
}

// Charts up to this width, as on a telephone, have less room for names.
const NARROW_PX = 500

// Rows of a chart's table that are shown.
const MAX_ROWS = 500

/**
 * A chart with its name, a sentence that says what it shows, and its data as a table.
 *
 * `option` is called anew when the colours change, or whether the chart is narrow. A click on a point, or Enter on the one that the arrow keys have
 * reached, calls `onPick` with its trial: the third number of the point's data.
 */
export function EChart(props: {
  label: string
  describe: string
  option: (p: Palette, isNarrow: boolean) => EChartsCoreOption
  table: () => ChartTable
  points?: readonly ChartPoint[]
  onPick?: (trial: number) => void
  height?: number
  /** Of data that follow a job: what holds back newer ones while the reader is on the chart. */
  hold?: Hold
}) {
  const { label, describe, option, points = [], onPick, height = 340, hold } = props
  const element = useRef<HTMLDivElement>(null)
  const chart = useRef<echarts.ECharts>(null)
  const [at, setAt] = useState<number>()
  const [isNarrow, setIsNarrow] = useState(false)
  const palette = usePalette()
  const id = useId()
  useEffect(() => {
    const made = echarts.init(element.current, null, { renderer: 'canvas' })
    chart.current = made
    const observer = new ResizeObserver(() => {
      made.resize()
      setIsNarrow(made.getWidth() <= NARROW_PX)
    })
    observer.observe(element.current!)
    return () => {
      observer.disconnect()
      made.dispose()
    }
  }, [])
  useEffect(() => {
    const { fontFamily } = getComputedStyle(document.body) // a canvas inherits none
    const common = { animation: false, textStyle: { fontFamily, fontSize: 12, color: palette.soft } }
    chart.current?.setOption(
      { ...common, ...option(palette, isNarrow) },
      { replaceMerge: ['series'], lazyUpdate: true },
    )
  }, [option, palette, isNarrow])
  useEffect(() => {
    const made = chart.current
    if (!made || !onPick) return
    const handler = (event: { data?: unknown }) => {
      const trial = Array.isArray(event.data) ? event.data[2] : undefined
      if (typeof trial === 'number') onPick(trial)
    }
    made.on('click', handler as never)
    return () => {
      if (!made.isDisposed()) made.off('click', handler as never)
    }
  }, [onPick])

  const step = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key]
    const now = at === undefined ? undefined : points[at]
    if (event.key === 'Enter' && now?.trial !== undefined) onPick?.(now.trial)
    if (by === undefined || points.length === 0) return
    event.preventDefault()
    const next = at === undefined ? (by > 0 ? 0 : points.length - 1) : (at + by + points.length) % points.length
    setAt(next)
    const { series, index } = points[next]!
    chart.current?.dispatchAction({ type: 'showTip', seriesIndex: series, dataIndex: index })
  }
  const hasPoints = points.length > 0
  const drawn = (
    // oxlint-disable-next-line jsx-a11y/no-static-element-interactions
    <div
      // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
      tabIndex={hasPoints ? 0 : undefined}
      role={hasPoints ? 'group' : undefined}
      aria-label={hasPoints ? `${label}: arrow keys step through its points, Enter opens one` : undefined}
      onKeyDown={hasPoints ? step : undefined}
    >
      <div ref={element} role="img" aria-label={`${label}. ${describe}`} style={{ width: '100%', height }} />
    </div>
  )
  return (
    <figure aria-labelledby={`${id}-label`}>
      <figcaption id={`${id}-label`}>{label}</figcaption>
      {hold ? <Held hold={hold}>{drawn}</Held> : drawn}
      {hasPoints && (
        <p role="status" className="soft" style={{ margin: 0, minHeight: '1.4em', fontSize: 13.5 }}>
          {at === undefined ? '' : points[at]?.text}
        </p>
      )}
      <AsTable label={label} table={props.table} />
    </figure>
  )
}

/** The data of a chart as a table, which is built when it is opened. */
function AsTable({ label, table }: { label: string; table: () => ChartTable }) {
  const [isOpen, setIsOpen] = useState(false)
  const {
    head,
    rows,
    more = 'The table of trials has all of them.',
  }: ChartTable = isOpen ? table() : { head: [], rows: [] }
  return (
    <details onToggle={(event) => setIsOpen(event.currentTarget.open)}>
      <summary className="soft">Show as table</summary>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label={`Data of ${label}`}>
        <table className="data">
          <thead>
            <tr>
              {head.map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.slice(0, MAX_ROWS).map((row, k) => (
              // oxlint-disable-next-line react/no-array-index-key
              <tr key={k}>
                {row.map((cell, j) => (
                  // oxlint-disable-next-line react/no-array-index-key
                  <td key={j}>{cell}</td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
        {rows.length > MAX_ROWS && (
          <p className="soft">
            The first {MAX_ROWS} of {rows.length} rows. {more}
          </p>
        )}
      </div>
    </details>
  )
}
