/** A field that an entry of the audit log changed; texts, of which one may be missing. */
export interface Change {
  field: string
  before?: string
  after?: string
}

type Fields = Record<string, unknown>

const isObject = (value: unknown): value is Fields =>
  typeof value === 'object' && value !== null && !Array.isArray(value)

/** The text of a value; times are seconds since the epoch. */
function shown(name: string, value: unknown): string {
  if (name.endsWith('_at') && typeof value === 'number') return new Date(1000 * value).toLocaleString()
  return typeof value === 'string' ? value : JSON.stringify(value)
}

/** The fields in which two documents differ, nested ones as a.b; null is no value. */
export function changesOf(before: Fields | null, after: Fields | null): Change[] {
  const names = [...new Set([...Object.keys(before ?? {}), ...Object.keys(after ?? {})])]
  return names.flatMap((field): Change[] => {
    const was = before?.[field]
    const is = after?.[field]
    if ((isObject(was) || isObject(is)) && (isObject(was) || was == null) && (isObject(is) || is == null)) {
      const nested = changesOf((was as Fields) ?? null, (is as Fields) ?? null)
      return nested.map((change) => ({ ...change, field: `${field}.${change.field}` }))
    }
    if (JSON.stringify(was ?? null) === JSON.stringify(is ?? null)) return []
    const change: Change = { field }
    if (was != null) change.before = shown(field, was)
    if (is != null) change.after = shown(field, is)
    return [change]
  })
}
