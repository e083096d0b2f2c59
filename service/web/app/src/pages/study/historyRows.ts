/** Rows of the chart of a study's history, and what is said of one. */
import type { Columns, FrontSeries } from '../../api/types'
import { count, interval, ownLabel, value } from '../../format'

const BASELINES = ['source', 'published']

export interface Row {
  trial: number
  label: string
  value: number
  /** Standard error of the value; null if that of an objective is unknown, as on one sample. */
  error: number | null
  rung: number
  samples: number
  isFull: boolean
  isFeasible: boolean
  isBaseline: boolean
  /** 95 % interval of the value of a trial at full budget. */
  ends: number[] | undefined
}

/** The trials that have values of the objectives `names`, with the mean of these values. */
export function rowsOf(trials: Columns, front: FrontSeries['points'] | undefined, names: readonly string[]): Row[] {
  const full = new Map(front?.map((point) => [point.trial, point]))
  const rows: Row[] = []
  trials.number!.forEach((number, i) => {
    const values = names.map((name) => trials[`value.${name}`]?.[i] as number | null | undefined)
    if (values.some((x) => x == null)) return
    const errors = names.map((name) => trials[`standard_error.${name}`]?.[i] as number | null | undefined)
    const point = full.get(number as number)
    rows.push({
      trial: number as number,
      label: trials.label![i] as string,
      value: values.reduce<number>((sum, x) => sum + x!, 0) / names.length,
      error: errors.some((x) => x == null) ? null : Math.hypot(...(errors as number[])) / names.length,
      rung: trials.rung![i] as number,
      samples: trials.samples![i] as number,
      isFull: point !== undefined,
      isFeasible: Object.keys(point?.violations ?? {}).length === 0,
      ends: (names.length === 1 ? point?.intervals[names[0]!] : point?.mean_interval) ?? undefined,
      isBaseline: BASELINES.includes(trials.origin![i] as string),
    })
  })
  return rows
}

/** Rows of the chart's series: a list for each of `rungs`, one of baselines, and one of trials outside the ranges. */
export function grouped(rows: readonly Row[], rungs: readonly number[], selected: ReadonlySet<number> | undefined) {
  const groups: Row[][] = [...rungs, 'baselines', 'outside'].map(() => [])
  const place = new Map(rungs.map((rung, k) => [rung, k]))
  for (const row of rows) {
    const isOutside = selected !== undefined && !selected.has(row.trial)
    groups[row.isBaseline ? rungs.length : isOutside ? rungs.length + 1 : place.get(row.rung)!]!.push(row)
  }
  return groups
}

/** What the chart of the values called `name` says of a row. `safe` escapes texts where they become HTML. */
export function text(row: Row | undefined, name: string, safe: (text: string) => string = (given) => given): string {
  if (!row) return ''
  const own = ownLabel(row.trial, row.label)
  const label = own && ` (${safe(own)})`
  const error = row.error === null ? '' : ` ± ${value(row.error)}`
  const [low, high] = row.ends ?? []
  const within = low === undefined || high === undefined ? '' : ` (${interval(low, high)})`
  const samples = `${count(row.samples)} ${row.samples === 1 ? 'sample' : 'samples'}`
  return `trial ${row.trial}${label}: ${safe(name)} ${value(row.value)}${error}${within} on ${samples}`
}
