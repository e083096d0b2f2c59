type Cell = string | number | null | undefined

// First characters of texts that spreadsheets run as formulas (OWASP, "CSV Injection"), full-width ones among them.
// Files of the server (`service/results/columns.py`) guard the same.
const FORMULA = /^[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]/

/**
 * A table as CSV (RFC 4180): the heads, and the rows. A text that a spreadsheet would run as a formula begins with an
 * apostrophe, since labels and names are those of other users. Numbers stay as they are.
 */
export function csv(heads: readonly string[], rows: readonly (readonly Cell[])[]) {
  return [heads, ...rows].map((row) => row.map(field).join(',') + '\r\n').join('')
}

function field(value: Cell): string {
  const text = typeof value === 'string' && FORMULA.test(value) ? `'${value}` : `${value ?? ''}`
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
