/** Trials as columns that follow a study: once all of them, then only those that have changed. */
import type { Columns } from './types'

/** Trials as columns, and the id of the study's last event when they were read. */
export interface TrialColumns {
  columns: Columns
  event: number
}

/** An answer of the API; with `is_whole`, it has all trials of the study. */
export type ReadColumns = TrialColumns & { is_whole: boolean }

/**
 * The trials `known` with those of `read` in place of their earlier rows; trials that are new follow. Rows are found by
 * the column `number`, which both have. Columns without a change are the same arrays as before, and the columns are
 * the same object if none has changed, so that charts are drawn only for changes.
 */
export function merged(known: TrialColumns | undefined, read: ReadColumns): TrialColumns {
  const { columns, event, is_whole } = read
  if (known === undefined || is_whole) return { columns, event }
  const numbers = known.columns.number!
  const rows = new Map(numbers.map((number, row) => [number, row]))
  let total = numbers.length
  const places = columns.number!.map((number) => rows.get(number) ?? total++)
  let isChanged = false
  const all: Columns = {}
  for (const name of new Set([...Object.keys(known.columns), ...Object.keys(columns)])) {
    const before = known.columns[name]
    // A column that is missing has no value in any row: the API leaves it out.
    const changes = columns[name]
    const isSame = before !== undefined && total === before.length
    if (isSame && places.every((row, k) => before[row] === (changes?.[k] ?? null))) {
      all[name] = before
      continue
    }
    isChanged = true
    const values = before === undefined ? [] : before.slice()
    for (let row = values.length; row < total; row++) values.push(null)
    places.forEach((row, k) => {
      values[row] = changes?.[k] ?? null
    })
    all[name] = values
  }
  return { columns: isChanged ? all : known.columns, event }
}
