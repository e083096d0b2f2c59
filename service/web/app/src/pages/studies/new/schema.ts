/** What the form reads from the JSON Schema of study files, which the server's OpenAPI document has. */

export interface Schema {
  $ref?: string
  type?: string
  const?: unknown
  enum?: unknown[]
  anyOf?: Schema[]
  oneOf?: Schema[]
  items?: Schema
  prefixItems?: Schema[]
  properties?: Record<string, Schema>
  required?: string[]
  default?: unknown
  description?: string
  examples?: unknown[]
}

export type Schemas = Record<string, Schema>

/** A schema without references and without the alternative null; its own description and default come first. */
export function resolved(schemas: Schemas, schema: Schema): Schema {
  if (schema.$ref !== undefined) {
    const { $ref, ...own } = schema
    return { ...resolved(schemas, schemas[$ref.slice($ref.lastIndexOf('/') + 1)] ?? {}), ...own }
  }
  const given = schema.anyOf?.filter((each) => each.type !== 'null')
  if (given?.length !== 1) return schema
  const { anyOf: _, ...own } = schema
  return { ...resolved(schemas, given[0]!), ...own }
}

/** The schema of the key `name` of a mapping. */
export const property = (schemas: Schemas, of: Schema, name: string): Schema =>
  resolved(schemas, resolved(schemas, of).properties?.[name] ?? {})

/** How a value is entered; null for values that only the text has. */
export type Input =
  | { kind: 'choice'; options: string[] }
  | { kind: 'flag' }
  | { kind: 'number' }
  | { kind: 'text' }
  | { kind: 'list'; isNumbers: boolean }
  | { kind: 'lines' }

export function inputOf(schema: Schema): Input | null {
  if (schema.enum?.every((each) => typeof each === 'string'))
    return { kind: 'choice', options: schema.enum as string[] }
  if (schema.type === 'boolean') return { kind: 'flag' }
  if (schema.type === 'integer' || schema.type === 'number') return { kind: 'number' }
  if (schema.type === 'string' && schema.const === undefined) return { kind: 'text' }
  const item = schema.type === 'array' ? (schema.items ?? schema.prefixItems?.[0]) : undefined
  if (item?.type === 'integer' || item?.type === 'number') return { kind: 'list', isNumbers: true }
  if (item?.type === 'string') return { kind: 'list', isNumbers: false }
  return null
}

/** The kinds of a section that has several, by the value of its key `kind`. */
export function kindsOf(schemas: Schemas, section: Schema): Map<string, Schema> {
  const found = new Map<string, Schema>()
  for (const each of section.oneOf ?? []) {
    const schema = resolved(schemas, each)
    const kind = schema.properties?.kind?.const
    if (typeof kind === 'string') found.set(kind, schema)
  }
  return found
}

/**
 * Whether an input leaves a value whole: `entered` would make two texts of one with a comma, and an input of one line
 * joins lines.
 */
export function canShow(input: Input, value: unknown): boolean {
  if (typeof value === 'string') return !value.includes('\n')
  if (!Array.isArray(value)) return typeof value !== 'object' || value === null
  const lost = input.kind === 'lines' ? /\n|^\s*$/ : /[,\n]|^\s|\s$|^$/
  return value.every((each) => typeof each !== 'object' && !(typeof each === 'string' && lost.test(each)))
}

/** A value as the text of an input; a list has commas, or lines where its input has them. */
export function shown(value: unknown, input?: Input): string {
  if (value === undefined || value === null) return ''
  if (Array.isArray(value)) return value.join(input?.kind === 'lines' ? '\n' : ', ')
  return typeof value === 'object' ? JSON.stringify(value) : String(value)
}

/** The value that the text of an input means; undefined for the default. Wrong numbers stay texts: the server names them. */
export function entered(input: Input, text: string): unknown {
  const number = (part: string) => (part === '' || Number.isNaN(Number(part)) ? part : Number(part))
  if (text.trim() === '') return undefined
  if (input.kind === 'number') return number(text.trim())
  if (input.kind === 'flag') return text === 'true'
  if (input.kind === 'lines') return text.split('\n').filter((line) => line.trim() !== '')
  if (input.kind !== 'list') return text
  const parts = text.split(',').map((part) => part.trim())
  return parts.filter((part) => part !== '').map((part) => (input.isNumbers ? number(part) : part))
}
