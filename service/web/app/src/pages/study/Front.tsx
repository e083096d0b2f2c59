import { NativeSelect, Slider } from '@mantine/core'
import { useNavigate } from '@tanstack/react-router'
import { useCallback, useMemo, useState } from 'react'
import type { FrontSeries, Objective, Study, Summary } from '../../api/types'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Palette, axis } from '../../charts/palette'
import { percent, value } from '../../format'
import { Nothing } from '../../parts/Answer'
import { ExportButton } from '../../parts/ExportButton'
import { preferred } from '../../preference'

type Point = FrontSeries['points'][number]

/** Two objectives of the trials at full budget, the Pareto front, and sliders that pick a model from it. */
export function Front({ study, front, heldOut }: { study: Study; front: FrontSeries; heldOut: Summary['holdout'] }) {
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
        <Chart points={points} objectives={objectives} across={across!} up={up!} picked={picked} onPick={open} />
        <div>
          <p style={{ marginTop: 0 }}>How much does each objective matter?</p>
          {objectives.map(({ name }, k) => (
            <div key={name} style={{ marginBottom: 14 }}>
              <div style={{ display: 'flex', justifyContent: 'space-between' }}>
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
          </div>
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
        {point.label !== `trial ${point.trial}` && `, ${point.label}`}:
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

function Chart(props: {
  points: Point[]
  objectives: Objective[]
  across: number
  up: number
  picked: Point | undefined
  onPick: (trial: number) => void
}) {
  const { points, objectives, across, up, picked, onPick } = props
  const x = objectives[across]!
  const y = objectives[up]!
  const front = useMemo(() => {
    const sign = x.direction === 'maximize' ? -1 : 1
    return points
      .filter((point) => point.is_on_front)
      .toSorted((a, b) => sign * (a.values[x.name]! - b.values[x.name]!))
  }, [points, x])
  const option = useCallback(
    (p: Palette) => {
      const data = (point: Point) => [point.values[x.name], point.values[y.name], point.trial]
      const rest = points.filter((point) => !point.is_on_front)
      const byTrial = new Map(points.map((point) => [point.trial, point]))
      const ring = picked ? [data(picked)] : []
      return {
        grid: { left: 52, right: 16, top: 12, bottom: 42 },
        tooltip: {
          trigger: 'item',
          confine: true,
          formatter: (hovered: { data: number[] }) => say(byTrial.get(hovered.data[2]!), objectives, escaped),
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
            data: rest.filter(isMerge).map(data),
          },
          { type: 'scatter', symbolSize: 10, itemStyle: { color: p.accent }, data: front.filter(isMerge).map(data) },
          { type: 'scatter', symbolSize: 10, itemStyle: { color: p.warm }, data: front.filter(isSource).map(data) },
          {
            type: 'scatter',
            symbolSize: 9,
            itemStyle: { color: 'transparent', borderColor: p.warm, borderWidth: 1.5 },
            data: rest.filter(isSource).map(data),
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
    [points, front, objectives, x, y, picked],
  )
  const stops = useMemo(
    () =>
      front.map((point) => {
        const own = front.filter(isSource(point) ? isSource : isMerge)
        const series = isSource(point) ? 2 : 1
        return { series, index: own.indexOf(point), text: say(point, objectives), trial: point.trial }
      }),
    [front, objectives],
  )
  return (
    <EChart
      label={`${x.name} and ${y.name} of the trials at full budget`}
      describe={`${front.length} of ${points.length} trials are on the Pareto front.${picked ? ` Trial ${picked.trial} is picked.` : ''}`}
      option={option}
      points={stops}
      onPick={onPick}
      table={() => ({
        head: ['trial', 'label', ...objectives.map(({ name }) => name), 'on the front'],
        rows: points.map((point) => [
          point.trial,
          point.label,
          ...objectives.map(({ name }) => value(point.values[name])),
          point.is_on_front ? 'yes' : 'no',
        ]),
      })}
    />
  )
}

const isSource = (point: Point) => point.origin === 'source'
const isMerge = (point: Point) => !isSource(point)

function say(point: Point | undefined, objectives: Objective[], safe = (text: string) => text): string {
  if (!point) return ''
  const values = objectives.map(({ name }) => `${safe(name)} ${value(point.values[name])}`).join(', ')
  const violated = Object.keys(point.violations).map(safe)
  return `trial ${point.trial}: ${values}${violated.length ? `; violates ${violated.join(', ')}` : ''}`
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
