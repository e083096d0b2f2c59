import './front.css'
import { Button, NativeSelect, Slider } from '@mantine/core'
import { useNavigate } from '@tanstack/react-router'
import { useQuery } from '@tanstack/react-query'
import { useCallback, useMemo, useState } from 'react'
import { heldOutFrom } from '../../api/queries'
import type { FrontSeries, Objective, Study, Summary } from '../../api/types'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Hold, useHold } from '../../charts/useHold'
import type { Selection } from '../../charts/ranges'
import { drawCross } from '../../charts/intervals'
import { type Palette, axis, paleSeries } from '../../charts/palette'
import { interval, ownLabel, percent, value } from '../../format'
import { Nothing } from '../../parts/Answer'
import { ExportButton } from '../../parts/ExportButton'
import { Difference } from '../../parts/Interval'
import { preferred } from '../../preference'
import { inRanges } from './Selected'

type Point = FrontSeries['points'][number]

/**
 * Two objectives of the trials at full budget, the Pareto front, and sliders that pick a model from it. Trials that are
 * not in the `selection` are pale; the front and the pick are those of all trials.
 */
export function Front(props: {
  study: Study
  front: FrontSeries
  heldOut: Summary['holdout']
  selection: Selection | undefined
}) {
  const { study } = props
  const latest = useMemo(
    () => ({ front: props.front, heldOut: props.heldOut, selection: props.selection }),
    [props.front, props.heldOut, props.selection],
  )
  // What the slider picks changes with held-out values, so the first ones are not held back.
  const key = JSON.stringify([props.selection?.words, props.heldOut.length > 0])
  const [{ front, heldOut, selection }, hold] = useHold(latest, { key, count: (data) => data.front.points.length })
  const { objectives, points } = front
  const [[across, up], setAxes] = useState([0, 1])
  const [weights, setWeights] = useState<number[]>(() => objectives.map(() => 50))
  const total = weights.reduce((a, b) => a + b, 0)
  const shares = weights.map((weight) => (total > 0 ? weight / total : 1 / weights.length))
  const onFront = useMemo(() => points.filter((point) => point.is_on_front), [points])
  // As the server does, only trials with held-out values of every objective count as held out.
  const held = useMemo(() => {
    const rows = heldOut.filter((row) => objectives.every(({ name }) => row.values[name] !== undefined))
    return new Map(rows.map((row) => [row.trial, row]))
  }, [heldOut, objectives])
  const isHeld = onFront.some((point) => held.has(point.trial))
  const trial = useMemo(() => {
    const all = onFront.filter((point) => !isHeld || held.has(point.trial))
    const valuesOf = (point: Point) =>
      objectives.map(({ name }) => (isHeld ? held.get(point.trial)!.values[name]!.value : point.values[name]!))
    const choices = all.map((point) => ({ trial: point.trial, values: valuesOf(point) }))
    return preferred(choices, objectives, shares)
    // oxlint-disable-next-line react-hooks/exhaustive-deps
  }, [onFront, held, isHeld, objectives, JSON.stringify(shares)])
  const picked = points.find((point) => point.trial === trial)
  // The pick from which prices are counted: the first one, until another is chosen.
  const [start, setStart] = useState<number>()
  if (start === undefined && isHeld && trial !== undefined) setStart(trial)
  const navigate = useNavigate()
  const open = useCallback(
    (number: number) => navigate({ to: '/studies/$id/trials/$number', params: { id: study.id, number: `${number}` } }),
    [navigate, study.id],
  )
  if (points.length === 0) return <Nothing>No trial has reached the full budget yet.</Nothing>
  if (objectives.length < 2) return <Single study={study} trial={points.find((point) => point.is_best)?.trial} />
  return (
    <>
      {objectives.length > 2 && (
        <div className="row">
          <Axis label="Across" objectives={objectives} at={across!} onChange={(k) => setAxes([k, up!])} />
          <Axis label="Up" objectives={objectives} at={up!} onChange={(k) => setAxes([across!, k])} />
        </div>
      )}
      <div className="two">
        <div>
          <Chart
            points={points}
            objectives={objectives}
            across={across!}
            up={up!}
            picked={picked}
            held={picked && held.get(picked.trial)}
            selection={selection}
            hold={hold}
            onPick={open}
          />
          <p className="soft">
            Points are on the samples of the search. Cross-hairs are 95 % intervals: of the picked trial, of the best
            one and, as a diamond, of the picked trial on held-out data. The line is the front of the two objectives.
            Orange points are baselines: sources are circles, published recipes squares.
            {selection &&
              `${inRanges(selection)} The others are small and pale; the front and the pick are those of all trials.`}
          </p>
          {objectives.length > 2 && (
            <Pairs {...{ points, objectives, selection }} chosen={[across!, up!]} picked={trial} onChoose={setAxes} />
          )}
        </div>
        <div className="weights">
          <p style={{ marginTop: 0 }}>How much does each objective matter?</p>
          {objectives.map(({ name }, k) => (
            <div key={name} style={{ marginBottom: 14 }}>
              <div className="weight">
                <span>{name}</span>
                <span>{percent(shares[k]!)}</span>
              </div>
              <Slider
                thumbLabel={`Importance of ${name}`}
                label={null}
                value={weights[k]}
                onChange={(weight) => setWeights((old) => old.map((each, j) => (j === k ? weight : each)))}
              />
            </div>
          ))}
          <div aria-live="polite" data-testid="picked">
            {picked && <Picked point={picked} objectives={objectives} row={held.get(picked.trial)} />}
            {picked && start !== undefined && <Price study={study} from={start} to={picked.trial} />}
          </div>
          {picked && start !== undefined && start !== picked.trial && (
            <Button size="xs" variant="default" mr={8} onClick={() => setStart(picked.trial)}>
              Count from trial {picked.trial}
            </Button>
          )}
          {picked && (
            <ExportButton
              study={study}
              label={`Export trial ${picked.trial}`}
              request={{ prefer: Object.fromEntries(objectives.map(({ name }, k) => [name, shares[k]!])) }}
            />
          )}
        </div>
      </div>
    </>
  )
}

function Axis(props: { label: string; objectives: Objective[]; at: number; onChange: (k: number) => void }) {
  const { label, objectives, at, onChange } = props
  return (
    <NativeSelect
      label={label}
      size="xs"
      data={objectives.map(({ name }, k) => ({ value: `${k}`, label: name }))}
      value={`${at}`}
      onChange={(event) => onChange(Number(event.currentTarget.value))}
    />
  )
}

/** The picked trial's values: held-out ones where there are some, and what each costs against the best of the front. */
function Picked(props: { point: Point; objectives: Objective[]; row: Summary['holdout'][number] | undefined }) {
  const { point, objectives, row } = props
  return (
    <>
      <p style={{ margin: '4px 0' }}>
        Trial {point.trial}
        {ownLabel(point.trial, point.label) && `, ${point.label}`}:
      </p>
      <dl style={{ display: 'grid', gridTemplateColumns: 'auto 1fr', gap: '2px 12px', margin: '0 0 10px' }}>
        {objectives.map(({ name }) => (
          <div key={name} style={{ display: 'contents' }}>
            <dt className="soft">{name}</dt>
            <dd style={{ margin: 0 }}>
              {value(row?.values[name]?.value ?? point.values[name])}
              <span className="interval">{row ? 'held-out' : `search ${value(point.values[name])}`}</span>
            </dd>
          </div>
        ))}
      </dl>
    </>
  )
}

/** What the choice of trial `to` costs and gains against the pick `from`, on held-out data. */
function Price({ study, from, to }: { study: Study; from: number; to: number }) {
  const differences = useQuery({ ...heldOutFrom(study.id, from), enabled: from !== to })
  if (from === to)
    return <p className="soft">Move a slider to see what another choice costs and gains on held-out data.</p>
  const own = differences.data?.get(to)
  if (differences.isError) return <p className="soft">{differences.error.message}</p>
  if (own === undefined) return null
  return (
    <>
      <p style={{ margin: '4px 0' }}>Minus trial {from}, on the same held-out samples:</p>
      <dl className="price" data-testid="price">
        {Object.entries(own).map(([name, difference]) => (
          <div key={name}>
            <dt className="soft">{name}</dt>
            <dd>
              <Difference of={difference} />
            </dd>
          </div>
        ))}
      </dl>
    </>
  )
}

// At most so many points of the front of all objectives are in a small front, and at most so many others. The corners
// of its line and the picked trial are always there.
const MAX_SMALL = 200
const SMALL = 100

/** A small front for each pair of objectives; a click shows it large. */
function Pairs(props: {
  points: Point[]
  objectives: Objective[]
  chosen: [number, number]
  picked: number | undefined
  selection: Selection | undefined
  onChoose: (pair: [number, number]) => void
}) {
  const { points, objectives, chosen, picked, selection, onChoose } = props
  // Each pair's drawing without the picked trial, which moves with the sliders.
  const pairs = useMemo(() => {
    const front = points.filter((point) => point.is_on_front)
    const rest = thinned(points.filter((point) => !point.is_on_front))
    const fewer = thinned(front)
    const scales = objectives.map(({ name }) => scale([...rest, ...front], name))
    return objectives.flatMap((x, i) =>
      objectives.slice(i + 1).map((y, k) => {
        const j = i + 1 + k
        const [across, up] = [scales[i]!, scales[j]!]
        const line = stairs(front, x, y).map(([a, b]) => `${across(a!).toFixed(1)},${(SMALL - up(b!)).toFixed(1)}`)
        const spot = (point: Point, r: number) => (
          <circle
            key={point.trial}
            className={point.is_on_front ? (isBaseline(point) ? 'baseline' : 'on-front') : 'rest'}
            opacity={isSelected(point, selection) ? 1 : 0.3}
            r={r}
            cx={across(point.values[x.name]!)}
            cy={SMALL - up(point.values[y.name]!)}
          />
        )
        const shown = new Set([...rest, ...fewer, ...corners(front, x, y)])
        const spots = [...shown].map((point) => spot(point, point.is_on_front ? 3 : 2))
        return { i, j, x: x.name, y: y.name, line: <polyline points={line.join(' ')} />, spots, spot }
      }),
    )
  }, [points, objectives, selection])
  const pick = points.find((point) => point.trial === picked)
  return (
    <div className="pairs" role="group" aria-label="Fronts of each pair of objectives">
      {pairs.map(({ i, j, x, y, line, spots, spot }) => {
        const isChosen = chosen.includes(i) && chosen.includes(j)
        return (
          <button key={`${x} ${y}`} type="button" aria-pressed={isChosen} onClick={() => onChoose([i, j])}>
            <svg viewBox={`-6 -6 ${SMALL + 12} ${SMALL + 12}`} aria-hidden="true">
              {spots}
              {pick && spot(pick, 5)}
              {line}
            </svg>
            {y} over {x}
          </button>
        )
      })}
    </div>
  )
}

/** Every n-th of the points, so that at most `MAX_SMALL` are left. */
function thinned(points: Point[]): Point[] {
  const step = Math.max(1, Math.ceil(points.length / MAX_SMALL))
  return points.filter((_, k) => k % step === 0)
}

/** Maps the values of an objective to lengths in a small front. */
function scale(points: Point[], name: string): (x: number) => number {
  const all = points.map((point) => point.values[name]!)
  const [low, high] = [Math.min(...all), Math.max(...all)]
  return (x) => (high > low ? ((x - low) / (high - low)) * SMALL : SMALL / 2)
}

/** The points on the front of two objectives, from the best of the first to the best of the second. */
function corners(points: readonly Point[], x: Objective, y: Objective): Point[] {
  const cost = (point: Point, { name, direction }: Objective) =>
    (direction === 'maximize' ? -1 : 1) * point.values[name]!
  const found: Point[] = []
  let best = Infinity
  for (const point of points
    .filter((each) => each.is_on_front)
    .toSorted((a, b) => cost(a, x) - cost(b, x) || cost(a, y) - cost(b, y))) {
    if (cost(point, y) >= best) continue
    best = cost(point, y)
    found.push(point)
  }
  return found
}

/** The front of two objectives as corners of a step line, from the best of the first to the best of the second. */
function stairs(points: readonly Point[], x: Objective, y: Objective): number[][] {
  const found: number[][] = []
  for (const point of corners(points, x, y)) {
    const last = found.at(-1)
    if (last) found.push([point.values[x.name]!, last[1]!])
    found.push([point.values[x.name]!, point.values[y.name]!])
  }
  return found
}

function Chart(props: {
  points: Point[]
  objectives: Objective[]
  across: number
  up: number
  picked: Point | undefined
  held: Summary['holdout'][number] | undefined
  selection: Selection | undefined
  hold: Hold
  onPick: (trial: number) => void
}) {
  const { points, objectives, across, up, picked, held, selection, hold, onPick } = props
  const x = objectives[across]!
  const y = objectives[up]!
  const front = useMemo(() => {
    const sign = x.direction === 'maximize' ? -1 : 1
    return points
      .filter((point) => point.is_on_front)
      .toSorted((a, b) => sign * (a.values[x.name]! - b.values[x.name]!))
  }, [points, x])
  const isShown = useCallback((point: Point) => isSelected(point, selection), [selection])
  const merges = useMemo(() => front.filter((point) => isMerge(point) && isShown(point)), [front, isShown])
  const outside = useMemo(() => points.filter((point) => !isShown(point)), [points, isShown])
  const option = useCallback(
    (p: Palette) => {
      const data = (point: Point) => [point.values[x.name], point.values[y.name], point.trial]
      const rest = points.filter((point) => !point.is_on_front)
      const byTrial = new Map(points.map((point) => [point.trial, point]))
      const ring = picked ? [data(picked)] : []
      const cross = (point: Point) => [...data(point), ...point.intervals[x.name]!, ...point.intervals[y.name]!]
      const best = points.find((point) => point.is_best && point.trial !== picked?.trial)
      const [heldX, heldY] = [held?.values[x.name], held?.values[y.name]]
      const heldOut = heldX && heldY ? [heldX.value, heldY.value, held!.trial, ...heldX.ci95, ...heldY.ci95] : undefined
      const hair = (each: (number | undefined)[][], color: string) => ({
        type: 'custom',
        silent: true,
        itemStyle: { color },
        encode: { x: [0, 3, 4], y: [1, 5, 6] },
        data: each,
        renderItem: drawCross,
      })
      return {
        grid: { left: 52, right: 16, top: 12, bottom: 42 },
        tooltip: {
          trigger: 'item',
          confine: true,
          formatter: (hovered: { data: number[] }) => sayAll(byTrial.get(hovered.data[2]!), objectives, escaped),
        },
        xAxis: axis(p, x.name),
        yAxis: axis(p, y.name, { nameGap: 38 }),
        dataZoom: [{ type: 'inside', filterMode: 'none', zoomOnMouseWheel: 'ctrl' }],
        series: [
          {
            type: 'scatter',
            large: true,
            largeThreshold: 1500,
            symbolSize: 6,
            itemStyle: { color: p.pale },
            data: rest.filter((point) => isMerge(point) && isShown(point)).map(data),
          },
          { type: 'scatter', symbolSize: 10, itemStyle: { color: p.accent }, data: merges.map(data) },
          {
            type: 'scatter',
            symbol: symbolOf(byTrial),
            symbolSize: 10,
            itemStyle: { color: p.warm },
            data: front.filter(isBaseline).map(data),
          },
          {
            type: 'scatter',
            symbol: symbolOf(byTrial),
            symbolSize: 9,
            itemStyle: { color: 'transparent', borderColor: p.warm, borderWidth: 1.5 },
            data: rest.filter(isBaseline).map(data),
          },
          { ...paleSeries(p), data: outside.map(data) },
          {
            type: 'line',
            silent: true,
            symbol: 'none',
            lineStyle: { color: p.accent, width: 1 },
            data: stairs(points, x, y),
          },
          hair(best ? [cross(best)] : [], p.middle),
          hair(picked ? [cross(picked)] : [], p.ink),
          hair(heldOut ? [heldOut] : [], p.good),
          {
            type: 'scatter',
            silent: true,
            symbol: 'diamond',
            symbolSize: 14,
            itemStyle: { color: p.good },
            data: heldOut ? [heldOut.slice(0, 3)] : [],
          },
          {
            type: 'scatter',
            silent: true,
            symbolSize: 20,
            itemStyle: { color: 'transparent', borderColor: p.ink, borderWidth: 2 },
            data: ring,
          },
        ],
      }
    },
    [points, front, merges, outside, isShown, objectives, x, y, picked, held],
  )
  const stops = useMemo(() => {
    const own = { 1: merges, 2: front.filter(isBaseline), 4: outside } // by series
    return front.map((point) => {
      const series = isBaseline(point) ? 2 : isShown(point) ? 1 : 4
      return { series, index: own[series].indexOf(point), text: sayAll(point, objectives), trial: point.trial }
    })
  }, [front, merges, outside, isShown, objectives])
  return (
    <EChart
      label={`${x.name} and ${y.name} of the trials at full budget`}
      describe={`${front.length} of ${points.length} trials are on the Pareto front.${picked ? ` Trial ${picked.trial} is picked.` : ''}${inRanges(selection)}`}
      option={option}
      hold={hold}
      points={stops}
      onPick={onPick}
      table={() => ({
        head: ['trial', 'label', ...objectives.flatMap(({ name }) => [name, '95 % interval']), 'on the front'],
        rows: points
          .filter(isShown)
          .map((point) => [
            point.trial,
            point.label,
            ...objectives.flatMap(({ name }) => [
              value(point.values[name]),
              interval(...(point.intervals[name] as [number, number])),
            ]),
            point.is_on_front ? 'yes' : 'no',
          ]),
      })}
    />
  )
}

const isBaseline = (point: Point) => point.origin === 'source' || point.origin === 'published'
/** Whether a trial is in the ranges of parameters, which say nothing of baselines. */
const isSelected = (point: Point, selection: Selection | undefined) =>
  isBaseline(point) || selection === undefined || selection.trials.has(point.trial)
const isMerge = (point: Point) => !isBaseline(point)

const symbolOf = (byTrial: Map<number, Point>) => (at: number[]) =>
  byTrial.get(at[2]!)?.origin === 'published' ? 'rect' : 'circle'

/** The values of a trial with their intervals, and the constraints that it violates. */
function sayAll(point: Point | undefined, objectives: Objective[], safe = (text: string) => text): string {
  if (!point) return ''
  const values = objectives
    .map(
      ({ name }) =>
        `${safe(name)} ${value(point.values[name])} (${interval(...(point.intervals[name] as [number, number]))})`,
    )
    .join(', ')
  const violated = Object.keys(point.violations).map(safe)
  const own = ownLabel(point.trial, point.label)
  const label = own && ` (${safe(own)})`
  return `trial ${point.trial}${label}: ${values}${violated.length ? `; violates ${violated.join(', ')}` : ''}`
}

/** In place of a front: with one objective there is one best trial. */
function Single({ study, trial }: { study: Study; trial: number | undefined }) {
  return (
    <>
      <p>The study has one objective, so it has one best trial and no front.</p>
      {trial !== undefined && <ExportButton study={study} label={`Export trial ${trial}`} request={{ trial }} />}
    </>
  )
}
