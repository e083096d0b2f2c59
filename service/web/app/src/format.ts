/** Texts of numbers, as all tables and charts write them. */

// Where this browser keeps the number of decimals.
const DECIMALS = 'decimals'

/** The numbers of decimals of a metric that a reader may choose. */
export const MIN_DECIMALS = 1
export const MAX_DECIMALS = 6

/** The number of decimals of a metric: as chosen in the settings, or 3. */
export function decimals(): number {
  const chosen = Number(localStorage.getItem(DECIMALS) ?? NaN)
  return Number.isInteger(chosen) && chosen >= MIN_DECIMALS && chosen <= MAX_DECIMALS ? chosen : 3
}

export const setDecimals = (chosen: number) => localStorage.setItem(DECIMALS, `${chosen}`)

/** A metric with three decimals, or as many as are chosen; nothing for a missing value. */
export const value = (x: number | null | undefined) => (x == null ? '' : minus(x.toFixed(decimals())))

// From here down, the first digits of a number say more than its first decimals.
const SMALL = 0.1

/**
 * The value of a parameter of a search space, which may also be a text, a truth value or a list. A small number has as
 * many digits as a metric has decimals: parameters may span decades.
 */
export function parameterValue(given: unknown): string {
  if (typeof given === 'number') {
    if (Number.isInteger(given)) return minus(String(given))
    return Math.abs(given) < SMALL ? minus(String(Number(given.toPrecision(decimals())))) : value(given)
  }
  return typeof given === 'string' ? given : (JSON.stringify(given) ?? '')
}

/** A difference with its sign. */
export const signed = (x: number) => `${x < 0 ? '−' : '+'}${Math.abs(x).toFixed(decimals())}`

export const count = (x: number) => x.toLocaleString('en-US')

/** A confidence interval. */
export const interval = (low: number, high: number) => `${value(low)} to ${value(high)}`

export const percent = (x: number) => `${(100 * x).toFixed(0)} %`

/** Bytes in decimal units, such as 15.2 GB. */
export function bytes(x: number): string {
  const units = ['B', 'kB', 'MB', 'GB', 'TB']
  let k = 0
  while (x >= 1000 && k < units.length - 1) {
    x /= 1000
    k += 1
  }
  return `${k === 0 ? x : x.toPrecision(3)} ${units[k]}`
}

/** Seconds as 42s, 4m50s or 1h05m. */
export function duration(seconds: number): string {
  const s = Math.round(seconds)
  if (s < 60) return `${s}s`
  if (s < 3600) return `${Math.floor(s / 60)}m${String(s % 60).padStart(2, '0')}s`
  return `${Math.floor(s / 3600)}h${String(Math.floor((s % 3600) / 60)).padStart(2, '0')}m`
}

/** A time (RFC 3339) in the viewer's time zone. */
export const localTime = (time: string) => new Date(time).toLocaleString()

/** A time to the minute, for tables. */
export const shortTime = (time: string) =>
  new Date(time).toLocaleString(undefined, { dateStyle: 'short', timeStyle: 'short' })

/** A text of the server with real minuses in place of the hyphens before numbers, as the page's own numbers have. */
export const withMinuses = (text: string) => text.replace(/(?<![\w.-])-(?=[\d.])/g, '−')

/** The label of a trial, such as that of a baseline; empty where it only repeats the trial's number. */
export const ownLabel = (number: number, label: string) => (label === `trial ${number}` ? '' : label)

/** The number at a mark of an axis. */
export const mark = (x: number) => minus(x.toLocaleString('en-US', { maximumSignificantDigits: 12 }))

const minus = (text: string) => text.replace('-', '−')
