/** Axes of parallel coordinates: each trial has a position on each axis, also where it has no number. */
import type { Columns } from '../api/types'
import { count } from '../format'

/** A lowest and a highest position that are kept. */
export type Range = [number, number]

export interface Axis {
  /** Name of the column. */
  column: string
  name: string
  kind: 'linear' | 'log' | 'category'
  /** Position of each trial. */
  positions: Float64Array
  extent: Range
  /** Distance between positions that the arrow keys reach. */
  step: number
  /** The value at a position. */
  value: (position: number) => string
  /** The value at a position, or `none` below the lowest one. */
  text: (position: number) => string
  /** Marked positions: the ends, or all categories. */
  marks: number[]
  /** The lowest position with a value; positions below it stand for "no value". */
  lowest: number
  /** The value at a position as it is in an address, with all digits. */
  written: (position: number) => string
  /** The position of a value that `written` gave, also outside the axis; undefined if no position has it. */
  read: (written: string) => number | undefined
}

type Cell = number | string | boolean | null | undefined

// An axis is logarithmic from this ratio of the largest to the smallest value on, if half of the values are below the
// largest one by the second ratio. Of values that are spread evenly, the smallest one alone may be very small.
const LOG_RATIO = 1000
const LOG_MEDIAN_RATIO = 10

// Distance of "no value" from the lowest value, as share of the axis.
const GAP = 0.08

const STEPS = 200

/** The axis of a column; undefined if all trials have the same value, or none. */
export function axisOf(column: string, values: readonly Cell[]): Axis | undefined {
  const given = values.filter((value) => value != null)
  const hasMissing = given.length < values.length
  const isNumber = given.every((value) => typeof value === 'number')
  return isNumber
    ? numeric(column, values as readonly (number | null)[], given as number[], hasMissing)
    : categorical(column, values, given, hasMissing)
}

function numeric(column: string, values: readonly (number | null)[], given: number[], hasMissing: boolean) {
  let [low, high] = [Infinity, -Infinity]
  for (const value of given) {
    if (value < low) low = value
    if (value > high) high = value
  }
  if (given.length === 0 || (low === high && !hasMissing)) return undefined
  const isLog = low > 0 && high / low >= LOG_RATIO && median(given) * LOG_MEDIAN_RATIO <= high
  const isWhole = !isLog && given.every(Number.isInteger)
  const place = isLog ? Math.log10 : (value: number) => value
  const [first, last] = [place(low), place(high)]
  const none =
    first - GAP * (last - first || 1) * (isWhole && last - first < 1 / GAP ? 1 / GAP / (last - first || 1) : 1)
  const digits = isWhole ? count : (value: number) => `${Number(value.toPrecision(3))}`.replace('-', '−')
  return axis(column, isLog ? 'log' : 'linear', {
    positions: Float64Array.from(values, (value) => (value == null ? none : place(value))),
    extent: [hasMissing ? none : first, last],
    step: isWhole ? 1 : (last - first) / STEPS || 1,
    value: (at) => digits(isLog ? 10 ** at : isWhole ? Math.round(at) : at),
    marks: first === last ? [first] : [first, last],
    lowest: first,
    written: (at) => `${shortest(isLog ? 10 ** at : at)}`,
    read: (written) => {
      const at = written.trim() === '' ? NaN : place(Number(written))
      if (!Number.isFinite(at)) return undefined
      // A logarithm is not exact: an end of the axis stays the end.
      return [first, last].find((end) => Math.abs(at - end) <= 1e-10 * (Math.abs(end) + last - first)) ?? at
    },
  })
}

/** A number without the last digits if these are the rounding of a sum, such as 0.1 + 0.2. */
function shortest(exact: number): number {
  const short = Number(exact.toPrecision(12))
  return Math.abs(short - exact) <= 1e-15 * Math.abs(exact) ? short : exact
}

const median = (values: readonly number[]) => Float64Array.from(values).sort()[Math.floor(values.length / 2)]!

function categorical(column: string, values: readonly Cell[], given: readonly Cell[], hasMissing: boolean) {
  const names = [...new Set(given.map(String))].toSorted()
  if (names.length < 2 && !hasMissing) return undefined
  const index = new Map(names.map((name, k) => [name, k]))
  return axis(column, 'category', {
    positions: Float64Array.from(values, (value) => (value == null ? -1 : index.get(String(value))!)),
    extent: [hasMissing ? -1 : 0, names.length - 1],
    step: 1,
    value: (at) => names[Math.round(at)] ?? '',
    marks: names.map((_, k) => k),
    lowest: 0,
    written: (at) => names[Math.round(at)] ?? '',
    read: (written) => index.get(written),
  })
}

function axis(column: string, kind: Axis['kind'], rest: Omit<Axis, 'column' | 'name' | 'kind' | 'text'>): Axis {
  const { extent, lowest, value, marks } = rest
  const tolerance = 1e-9 * (Math.abs(lowest) + Math.abs(extent[1]) + 1)
  return {
    ...rest,
    column,
    name: column.replace(/^(parameter|value)\./, ''),
    kind,
    marks: extent[0] < lowest ? [extent[0], ...marks] : marks,
    text: (at) => (at < lowest - tolerance ? 'none' : value(at)),
  }
}

/** Indices of the trials whose positions are within the ranges of all axes. */
export function within(axes: readonly Axis[], ranges: readonly Range[]): number[] {
  const kept: number[] = []
  const length = axes[0]?.positions.length ?? 0
  const given = axes.map(({ positions }, k) => [positions, ...ranges[k]!] as const)
  next: for (let i = 0; i < length; i += 1) {
    for (const [positions, low, high] of given) {
      const at = positions[i]!
      if (at < low || at > high) continue next
    }
    kept.push(i)
  }
  return kept
}

/** The range that a user has chosen for an axis, cut to what the axis has; by default the whole axis. */
export function rangeOf({ extent }: Axis, chosen: Range | undefined): Range {
  if (chosen === undefined) return extent
  return [Math.max(extent[0], Math.min(chosen[0], extent[1])), Math.min(extent[1], Math.max(chosen[1], extent[0]))]
}

/**
 * A range as conditions of the table of trials, such as `parameter.k>=0.1`; none for a whole axis. Undefined if the
 * table has no condition for it: several but not all categories, or some numbers and "no value".
 */
export function conditions(axis: Axis, [low, high]: Range): string[] | undefined {
  const { column, extent, kind, lowest, text } = axis
  if (low <= extent[0] && high >= extent[1]) return []
  if (low < lowest && extent[0] < lowest) return undefined
  if (kind === 'category') {
    if (low <= lowest && high >= extent[1]) return undefined
    return Math.ceil(low) === Math.floor(high) ? [`${column}=${text(Math.floor(high))}`] : undefined
  }
  // Columns have 6 digits, and the table has all: a bound that may have been rounded is moved outwards.
  const number = (at: number, direction: 1 | -1) => {
    const exact = kind === 'log' ? 10 ** at : at
    const short = Number(exact.toPrecision(5))
    if (Math.abs(short - exact) <= 1e-9 * Math.abs(exact)) return `${short}`
    return `${Number((exact + direction * 1e-6 * Math.abs(exact)).toPrecision(7))}`
  }
  return [
    ...(low > extent[0] ? [`${column}>=${number(low, -1)}`] : []),
    ...(high < extent[1] ? [`${column}<=${number(high, 1)}`] : []),
  ]
}

/** Columns of numbers, texts or switches as axes, and the names of those in which all trials are alike. */
export function axesOf(columns: Columns, names: readonly string[]): { axes: Axis[]; constant: string[] } {
  const found = names.flatMap((name) => (columns[name] ? [{ name, axis: axisOf(name, columns[name]) }] : []))
  return {
    axes: found.flatMap(({ axis: own }) => (own ? [own] : [])),
    constant: found.flatMap(({ name, axis: own }) => (own ? [] : [name])),
  }
}
