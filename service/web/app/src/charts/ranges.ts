/**
 * Ranges of parallel coordinates in an address, and the trials within them.
 *
 * An address has `COLUMN:LOW:HIGH` for each range, separated by commas; an end that is left out is open, so that it
 * follows the trials of a study that runs. `COLUMN:none` are the trials without a value.
 */
import type { Columns } from '../api/types'
import { type Axis, type Range, axesOf, within } from './axes'

/** Ranges of positions, keyed by column. */
export type Ranges = Readonly<Record<string, Range>>

interface Ends {
  /** As an axis writes them; empty where the range is open. */
  low: string
  high: string
  isNone: boolean
}

/** Ranges that an address asks for, keyed by column. */
export type Asked = ReadonlyMap<string, Ends>

// Ranges of an address that are read, as many as there may be axes.
const MAX_RANGES = 16

const NONE = 'none'

/** The ranges of an address; parts that are none are left out. */
export function asked(address: string | undefined): Asked {
  const found = new Map<string, Ends>()
  for (const part of (address ?? '').split(',').slice(0, MAX_RANGES)) {
    const [column, low, high, ...rest] = part.split(':').map(decoded)
    if (!column || rest.length > 0) continue
    if (low === NONE && high === undefined) found.set(column, { low: '', high: '', isNone: true })
    else if (low !== undefined && high !== undefined && low + high !== '')
      found.set(column, { low, high, isNone: false })
  }
  return found
}

function decoded(text: string): string {
  try {
    return decodeURIComponent(text)
  } catch {
    return ''
  }
}

/** The ranges of an address without that of a column. */
export function without(address: string | undefined, column: string): string | undefined {
  const parts = (address ?? '').split(',').filter((part) => decoded(part.split(':')[0]!) !== column)
  return parts.join(',') || undefined
}

/** Ranges of axes as an address has them; undefined if all axes are whole. */
export function written(axes: readonly Axis[], ranges: Ranges): string | undefined {
  const parts = axes.flatMap((axis) => {
    const { column, extent, lowest } = axis
    const [low, high] = ranges[column] ?? extent
    const isOpen = [low <= extent[0], high >= extent[1]]
    if (isOpen[0] && isOpen[1]) return []
    const isNone = isOpen[0] && high < lowest
    const ends = isNone ? [NONE] : [isOpen[0] ? '' : axis.written(low), isOpen[1] ? '' : axis.written(high)]
    return [[column, ...ends].map(encodeURIComponent).join(':')]
  })
  return parts.join(',') || undefined
}

/**
 * The ranges of the axes that an address asks for, also where no trial is within them. A range that an axis cannot
 * have, such as a category that no trial has, is left out.
 */
export function rangesOf(axes: readonly Axis[], all: Asked): Ranges {
  const found: Record<string, Range> = {}
  for (const axis of axes) {
    const { column, extent, lowest } = axis
    const ends = all.get(column)
    if (ends === undefined) continue
    const low = ends.low === '' ? extent[0] : axis.read(ends.low)
    const high = ends.high === '' ? extent[1] : axis.read(ends.high)
    if (ends.isNone && extent[0] < lowest) found[column] = [extent[0], extent[0]]
    else if (!ends.isNone && low !== undefined && high !== undefined) found[column] = [low, high]
  }
  return found
}

/** Proposed trials that have finished a rung. */
export function scored(columns: Columns): Columns {
  const rows = columns.number!.flatMap((_, k) =>
    columns.samples![k] != null && columns.origin![k] === 'search' ? [k] : [],
  )
  return Object.fromEntries(Object.entries(columns).map(([name, all]) => [name, rows.map((k) => all[k]!)]))
}

/** The proposed trials within all ranges of an address. */
export interface Selection {
  trials: ReadonlySet<number>
  /** Number of proposed trials that have finished a rung. */
  total: number
  /** What each range says, such as "k at least 0.1". */
  words: string[]
}

/** The trials that an address selects; undefined if it has no range that an axis can have. */
export function selection(columns: Columns, all: Asked): Selection | undefined {
  if (all.size === 0) return undefined
  const rows = scored(columns)
  const { axes } = axesOf(rows, [...all.keys()])
  const ranges = rangesOf(axes, all)
  const used = axes.filter(({ column }) => ranges[column] !== undefined)
  if (used.length === 0) return undefined
  const kept = within(
    used,
    used.map(({ column }) => ranges[column]!),
  )
  return {
    trials: new Set(kept.map((k) => rows.number![k] as number)),
    total: rows.number!.length,
    words: used.map((axis) => words(axis, ranges[axis.column]!)),
  }
}

function words({ name, kind, extent, lowest, text }: Axis, [low, high]: Range): string {
  const isOpen = low <= extent[0]
  const hasNone = isOpen && extent[0] < lowest
  if (hasNone && high < lowest) return `${name} ${NONE}`
  const [from, to] = [text(Math.max(low, lowest)), text(high)]
  if (kind === 'category' || (!isOpen && (high < extent[1] || low === high)))
    return `${name} ${from === to ? from : `${from} to ${to}`}${hasNone ? ` or ${NONE}` : ''}`
  return isOpen ? `${name} at most ${to}${hasNone ? ` or ${NONE}` : ''}` : `${name} at least ${from}`
}
