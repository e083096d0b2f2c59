import './parallel.css'
import { RangeSlider } from '@mantine/core'
import { useElementSize } from '@mantine/hooks'
import { scaleLinear } from 'd3-scale'
import { type KeyboardEvent, memo, useCallback, useEffect, useMemo, useRef, useState } from 'react'
import { type Axis, type Range, rangeOf, within } from './axes'
import type { Ranges } from './ranges'
import { usePalette } from './palette'

const TOP = 84
const BOTTOM = 24
const HEIGHT = 400

// Least pixels between two axes; more axes than there is room for are scrolled.
const LEAST_GAP = 92

// Steps of the keys PageUp and PageDown.
const PAGE = 10

// Lines of one stroke. Where lines of several strokes cross, their colours add up.
const SLICE = 200

// Lines that are drawn while a range is moved.
const MAX_WHILE_MOVING = 2000

// Milliseconds without a move after which `onFilter` is called: a key that is held moves a range many times a second.
const SETTLED_MS = 150

/**
 * Trials as lines across axes. Each axis is a range slider, so that mouse and keyboard choose which trials are kept.
 * `onFilter` receives the ranges, keyed by column, shortly after the last move.
 */
export function Parallel(props: { axes: readonly Axis[]; ranges: Ranges; onFilter: (ranges: Ranges) => void }) {
  const { axes, onFilter } = props
  const { ref, width: room } = useElementSize()
  const [moved, setMoved] = useState<Ranges>()
  const width = Math.max(room, axes.length * LEAST_GAP)
  const ranges = moved ?? props.ranges
  const kept = useMemo(
    () =>
      within(
        axes,
        axes.map((axis) => ranges[axis.column] ?? axis.extent),
      ),
    [axes, ranges],
  )
  const across = useMemo(() => {
    const margin = LEAST_GAP / 2
    return scaleLinear([0, Math.max(1, axes.length - 1)], [margin, Math.max(margin + 1, width - margin)])
  }, [axes.length, width])
  const isMoving = moved !== undefined
  const latest = useRef({ ranges: props.ranges, onFilter })
  useEffect(() => {
    latest.current = { ranges: props.ranges, onFilter }
  })
  const pending = useRef<{ ranges: Ranges; timer?: number }>(undefined)
  useEffect(() => () => window.clearTimeout(pending.current?.timer), [])
  const move = useCallback((column: string, range: Range) => {
    window.clearTimeout(pending.current?.timer)
    pending.current = { ranges: { ...(pending.current ?? latest.current).ranges, [column]: range } }
    setMoved(pending.current.ranges)
  }, [])
  const end = useCallback(
    (column: string, range: Range) => {
      move(column, range)
      const { ranges: settled } = pending.current!
      pending.current!.timer = window.setTimeout(() => {
        pending.current = undefined
        latest.current.onFilter(settled)
        setMoved(undefined)
      }, SETTLED_MS)
    },
    [move],
  )
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Axes and lines of trials">
      <div ref={ref} style={{ width: '100%' }} />
      <div className="parallel" style={{ width, height: HEIGHT }}>
        <Lines axes={axes} kept={kept} width={width} isMoving={isMoving} />
        {axes.map((axis, k) => {
          const [low, high] = rangeOf(axis, ranges[axis.column])
          return <Slider key={axis.column} axis={axis} low={low} high={high} left={across(k)} {...{ move, end }} />
        })}
      </div>
    </div>
  )
}

/** Pixels from the top of a position on an axis. */
const down = ({ extent: [low, high] }: Axis) =>
  scaleLinear([low, high === low ? low + 1 : high], [HEIGHT - BOTTOM, TOP])

function Lines(props: { axes: readonly Axis[]; kept: readonly number[]; width: number; isMoving: boolean }) {
  const { axes, kept, width, isMoving } = props
  const canvas = useRef<HTMLCanvasElement>(null)
  const palette = usePalette()
  const heights = useMemo(
    () =>
      axes.map((axis) => {
        const scale = down(axis)
        return Float32Array.from(axis.positions, (at) => scale(at))
      }),
    [axes],
  )
  useEffect(() => {
    const frame = requestAnimationFrame(() => {
      const element = canvas.current!
      const ratio = window.devicePixelRatio
      element.width = width * ratio
      element.height = HEIGHT * ratio
      const context = element.getContext('2d')!
      context.scale(ratio, ratio)
      const step = isMoving ? Math.max(1, Math.ceil(kept.length / MAX_WHILE_MOVING)) : 1
      const margin = LEAST_GAP / 2
      const across = scaleLinear([0, Math.max(1, axes.length - 1)], [margin, Math.max(margin + 1, width - margin)])
      const lefts = axes.map((_, k) => across(k))
      context.strokeStyle = palette.accent
      context.globalAlpha = Math.min(0.6, Math.max(0.08, 60 / (kept.length / step + 1)))
      for (let start = 0; start < kept.length; start += SLICE * step) {
        context.beginPath()
        for (let j = start; j < Math.min(kept.length, start + SLICE * step); j += step) {
          const trial = kept[j]!
          context.moveTo(lefts[0]!, heights[0]![trial]!)
          for (let k = 1; k < lefts.length; k += 1) context.lineTo(lefts[k]!, heights[k]![trial]!)
        }
        context.stroke()
      }
    })
    return () => cancelAnimationFrame(frame)
  }, [axes, kept, heights, width, isMoving, palette])
  return <canvas ref={canvas} aria-hidden="true" style={{ width, height: HEIGHT }} />
}

/** An axis with its name and marks: a range slider. Only the one that moves is rendered anew. */
const Slider = memo(function Slider(props: {
  axis: Axis
  low: number
  high: number
  left: number
  move: (column: string, range: Range) => void
  end: (column: string, range: Range) => void
}) {
  const { axis, low, high, left, move, end } = props
  const { column, name, extent, step, text, marks } = axis
  const scale = down(axis)
  // The slider itself knows the arrow keys, of which a long way takes very many.
  const jump = (event: KeyboardEvent<HTMLDivElement>) => {
    const thumbs = [...event.currentTarget.querySelectorAll('[role=slider]')]
    const thumb = thumbs.indexOf(event.target as Element)
    const by = { Home: -Infinity, End: Infinity, PageUp: PAGE * step, PageDown: -PAGE * step }[event.key]
    if (thumb < 0 || by === undefined) return
    event.preventDefault()
    if (thumb === 0) end(column, [Math.max(extent[0], Math.min(high, low + by)), high])
    else end(column, [low, Math.max(low, Math.min(extent[1], high + by))])
  }
  return (
    <>
      <div className="name" style={{ left, width: LEAST_GAP - 6 }} title={name}>
        <span>{name}</span>
      </div>
      <div className="axis" style={{ left, top: TOP }} role="group" aria-label={name} onKeyDown={jump}>
        <RangeSlider
          orientation="vertical"
          h={HEIGHT - TOP - BOTTOM}
          size={2}
          thumbSize={13}
          min={extent[0]}
          max={extent[1]}
          step={step}
          minRange={0}
          value={[low, high]}
          label={text}
          thumbFromLabel={`${name}, lowest`}
          thumbToLabel={`${name}, highest`}
          thumbValueText={text}
          onChange={(range) => move(column, range)}
          onChangeEnd={(range) => end(column, range)}
        />
      </div>
      {marks.map((at) => (
        <div
          key={at}
          className="mark"
          aria-hidden="true"
          style={{ left, top: scale(at) + markOffset(axis, at), maxWidth: LEAST_GAP - 6 }}
        >
          {text(at)}
        </div>
      ))}
    </>
  )
})

/** Pixels by which a mark is moved, so that it is beside the thumbs: above the highest, below the others. */
function markOffset({ extent }: Axis, at: number): number {
  return at === extent[1] ? -24 : 8
}
