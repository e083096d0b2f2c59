/** A table as CSV (RFC 4180): the heads, and the rows. */
export function csv(heads: readonly string[], rows: readonly (readonly (string | number | null | undefined)[])[]) {
  return [heads, ...rows].map((row) => row.map(field).join(',') + '\r\n').join('')
}

function field(value: string | number | null | undefined): string {
  const text = `${value ?? ''}`
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text
}
