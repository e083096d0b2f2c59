import { Button } from '@mantine/core'
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { useCallback, useMemo } from 'react'
import { BASE, api } from '../../api/client'
import type { components } from '../../api/schema'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Palette, axis, usePalette } from '../../charts/palette'
import { useHold } from '../../charts/useHold'
import { duration, localTime, percent } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { timelineRoute } from '../../router'
import { useStudy } from './StudyLayout'

type Plot = components['schemas']['TimelinePlot']
type Shown = Plot & { start: number; end: number }
type Shares = components['schemas']['ReplicaShares']

const BINS = 300
const ROW_PX = 54

// From the bottom of a row to its top; what is left is idle.
const PHASES = ['score', 'swap', 'merge'] as const
const COLOURS = { score: 'accent', swap: 'good', merge: 'warm' } as const satisfies Record<string, keyof Palette>

/** A time of the address, in seconds since the epoch; undefined for any other text. */
const seconds = (text: string | undefined) =>
  text !== undefined && /^\d+(\.\d+)?$/.test(text) ? Number(text) : undefined

/** What each replica did over time, with the attempts of drivers, waits and faults of engines. */
export function Timeline() {
  const { study } = useStudy()
  const search = timelineRoute.useSearch()
  const [from, to] = [seconds(search.from), seconds(search.to)]
  const timeline = useQuery({
    queryKey: ['study', study.id, 'plots', 'timeline', from, to],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: study.id }, query: { from, to, bins: BINS } }
      return (await api.GET('/v1/studies/{study_id}/plots/timeline', { params, signal })).data!
    },
    placeholderData: keepPreviousData,
  })
  const dashboard = study.job?.dashboard_url // without the prefix that a proxy has removed
  return (
    <>
      <h2>Timeline</h2>
      {dashboard != null && (
        <p>
          <a href={BASE + dashboard.slice(dashboard.indexOf('/ray/#/'))}>The study&apos;s job in the Ray dashboard</a>
        </p>
      )}
      <Answer of={timeline}>
        {(found) => {
          const { start, end } = found
          if (start === null || end === null) return <Nothing>Nothing has been scored yet.</Nothing>
          const shown = { ...found, start, end }
          return (
            <>
              <Zoom shown={shown} isWhole={from === undefined && to === undefined} />
              {shown.replicas.length === 0 ? (
                <Nothing>No replica worked between these times.</Nothing>
              ) : (
                <>
                  <Chart found={found} choice={`${from} ${to} ${timeline.isPlaceholderData}`} />
                  <Totals shown={shown} />
                </>
              )}
              <Events events={shown.events} />
            </>
          )
        }}
      </Answer>
    </>
  )
}

/** Buttons that change the shown time, which is in the address. */
function Zoom({ shown: { start, end }, isWhole }: { shown: Shown; isWhole: boolean }) {
  const navigate = timelineRoute.useNavigate()
  const length = end - start
  const show = (from: number, to: number) =>
    navigate({ search: { from: Math.max(0, from).toFixed(3), to: to.toFixed(3) }, replace: true })
  const button = (label: string, from: number, to: number) => (
    <Button size="xs" variant="default" onClick={() => show(from, to)}>
      {label}
    </Button>
  )
  return (
    <div className="row">
      {button('Zoom in', start + length / 4, end - length / 4)}
      {button('Zoom out', start - length / 2, end + length / 2)}
      {button('Earlier', start - length / 2, end - length / 2)}
      {button('Later', start + length / 2, end + length / 2)}
      {!isWhole && (
        <Button size="xs" variant="default" onClick={() => navigate({ search: {}, replace: true })}>
          Whole time
        </Button>
      )}
      <span role="status" className="soft">
        {localTime(iso(start))} to {localTime(iso(end))}, {duration(length)}
      </span>
    </div>
  )
}

const iso = (time: number) => new Date(1000 * time).toISOString()

const mean = (values: number[]) => values.reduce((sum, x) => sum + x, 0) / Math.max(1, values.length)
const busy = (shares: Shares) => 1 - mean(shares.idle)

/** Times in which a driver worked on the study, or the study waited for one, cut to what is shown. */
function bands({ events, start, end }: Shown) {
  const changes = events.filter((event) => event.kind !== 'engine_fault')
  return changes.flatMap((event, k) => {
    const [from, to] = [Math.max(start, event.time), Math.min(end, changes[k + 1]?.time ?? end)]
    const text = event.kind === 'waiting' ? 'waits' : event.text.split(':')[0]!
    return from < to ? [{ from, to, text, isWait: event.kind === 'waiting' }] : []
  })
}

interface Drawing {
  coord: (at: number[]) => number[]
  size: (of: number[]) => number[]
  value: (dimension: number) => number
  visual: (name: string) => string
}

/** `found` has a start and an end. `choice` is another one where the times are, or become, others. */
function Chart({ found, choice }: { found: Plot; choice: string }) {
  const [held, hold] = useHold(found, { key: choice })
  const shown = held as Shown
  const { replicas, bins, start, end, events } = shown
  const attempts = useMemo(() => bands(shown), [shown])
  const faults = useMemo(
    () => events.filter(({ kind, time }) => kind === 'engine_fault' && time >= start && time <= end),
    [events, start, end],
  )
  const option = useCallback(
    (p: Palette) => {
      const width = (end - start) / BINS
      // Of each row and bin: where it begins, its row, and the shares below and up to the phase.
      const boxes = PHASES.map((phase, place) =>
        bins.flatMap((shares, row) =>
          shares[phase].flatMap((share, k) => {
            const below = PHASES.slice(0, place).reduce((sum, other) => sum + shares[other][k]!, 0)
            return share > 0 ? [[1000 * (start + k * width), row, below, below + share]] : []
          }),
        ),
      )
      const marks = {
        markArea: {
          silent: true,
          label: { position: 'top', color: p.soft, fontSize: 11 },
          data: attempts.map(({ from, to, text, isWait }, k) => [
            {
              xAxis: 1000 * from,
              name: text,
              itemStyle: { color: isWait ? p.warm : p.soft, opacity: isWait ? 0.25 : k % 2 ? 0.16 : 0.06 },
            },
            { xAxis: 1000 * to },
          ]),
        },
        markLine: {
          silent: true,
          symbol: 'none',
          lineStyle: { color: p.bad, type: 'dashed' },
          label: { position: 'start', distance: 18, color: p.bad, formatter: '⚠ fault' },
          data: faults.map(({ time }) => ({ xAxis: 1000 * time })),
        },
      }
      return {
        grid: { left: 130, right: 24, top: 40, bottom: 40 },
        tooltip: {
          trigger: 'item',
          confine: true,
          formatter: ({ data, seriesName }: { data: number[]; seriesName: string }) =>
            `${escaped(replicas[data[1]!]!)}: ${percent(data[3]! - data[2]!)} ${seriesName} from ${localTime(iso(data[0]! / 1000))}`,
        },
        xAxis: axis(p, 'time', {
          type: 'time',
          min: 1000 * start,
          max: 1000 * end,
          splitLine: { show: false },
          axisLabel: { color: p.soft, hideOverlap: true },
        }),
        yAxis: {
          type: 'category',
          inverse: true,
          // The share first: a long name is cut at its end.
          data: replicas.map((name, k) => `${percent(busy(bins[k]!))}  ${name}`),
          axisLabel: { color: p.soft, width: 118, overflow: 'truncate' },
          axisLine: { show: false },
          axisTick: { show: false },
        },
        series: PHASES.map((phase, place) => ({
          type: 'custom',
          name: phase,
          clip: true,
          itemStyle: { color: p[COLOURS[phase]] },
          encode: { x: 0, y: 1 },
          data: boxes[place],
          renderItem: (_: unknown, item: Drawing) => {
            const [left, middle] = item.coord([item.value(0), item.value(1)]) as [number, number]
            const right = item.coord([item.value(0) + 1000 * width, item.value(1)])[0]!
            const height = 0.64 * item.size([0, 1])[1]!
            const bottom = middle + height / 2
            return {
              type: 'rect',
              shape: {
                x: left,
                width: Math.max(1, right - left),
                y: bottom - height * item.value(3),
                height: height * (item.value(3) - item.value(2)),
              },
              style: { fill: item.visual('color') },
            }
          },
          ...(place === 0 ? marks : {}),
        })),
      }
    },
    [replicas, bins, start, end, attempts, faults],
  )
  return (
    <>
      <Legend />
      <EChart
        label="Shares of time of each replica"
        describe={replicas.map((name, k) => `${name} is busy ${percent(busy(bins[k]!))} of the time.`).join(' ')}
        option={option}
        hold={hold}
        height={90 + ROW_PX * replicas.length}
        table={() => ({
          head: ['replica', 'from', ...PHASES, 'idle'],
          rows: bins.flatMap((shares, row) =>
            shares.idle.map((idle, k) => [
              replicas[row]!,
              localTime(iso(start + (k * (end - start)) / BINS)),
              ...PHASES.map((phase) => percent(shares[phase][k]!)),
              percent(idle),
            ]),
          ),
        })}
      />
    </>
  )
}

function Legend() {
  const palette = usePalette()
  return (
    <p className="row soft" style={{ fontSize: 13.5, margin: '10px 0 0' }}>
      {PHASES.map((phase) => (
        <span key={phase}>
          <span aria-hidden="true" style={{ color: palette[COLOURS[phase]] }}>
            ■
          </span>{' '}
          {phase}
        </span>
      ))}
      <span>From the bottom of a row: score, swap, merge; the rest is idle. Before each name: its busy share.</span>
    </p>
  )
}

function Totals({ shown: { replicas, bins } }: { shown: Shown }) {
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Shares of the shown time">
      <table className="data" style={{ width: 'auto' }}>
        <thead>
          <tr>
            <th scope="col" className="l">
              replica
            </th>
            <th scope="col">busy</th>
            <th scope="col">merge</th>
            <th scope="col">swap</th>
            <th scope="col">score</th>
            <th scope="col">idle</th>
          </tr>
        </thead>
        <tbody>
          {replicas.map((name, k) => (
            <tr key={name}>
              <th scope="row" className="l">
                {name}
              </th>
              <td>{percent(busy(bins[k]!))}</td>
              {(['merge', 'swap', 'score', 'idle'] as const).map((phase) => (
                <td key={phase}>{percent(mean(bins[k]![phase]))}</td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

const KINDS = { attempt: '▸ driver', waiting: '○ wait', engine_fault: '⚠ fault' } as const

function Events({ events }: { events: Plot['events'] }) {
  return (
    <>
      <h3>Drivers, waits and faults</h3>
      {events.length === 0 && <Nothing>None.</Nothing>}
      <ul style={{ listStyle: 'none', padding: 0 }}>
        {events.map(({ time, kind, text }) => (
          <li key={`${time} ${text}`}>
            {KINDS[kind]} <span className="soft">{localTime(iso(time))}</span> {text}
          </li>
        ))}
      </ul>
    </>
  )
}
