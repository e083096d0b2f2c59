/** What experts inherit: options at the top of a specification are those of all experts that do not state their own. */
import { type Path, valueAt } from '../studies/new/yamlText'

/** What a fine-tuning reads, by the key of `data` that names it. */
export const KINDS = ['images', 'dataset', 'file'] as const
export type Kind = (typeof KINDS)[number]

const SHARED: Path = ['data']

/** The data that an expert whose own are at `path` inherits; undefined for data that are not those of an expert. */
export const inherited = (content: unknown, path: Path): unknown =>
  path.length > SHARED.length ? valueAt(content, SHARED) : undefined

/** The kind of the data at `path`, with what an expert inherits. Specifications of the server have all kinds, as null. */
export function kindOf(content: unknown, path: Path): Kind {
  const own = valueAt(content, path)
  const shared = inherited(content, path)
  const isGiven = (value: unknown) => value !== undefined && value !== null
  return (
    KINDS.find((kind) => isGiven(valueAt(own, [kind]))) ??
    KINDS.find((kind) => valueAt(own, [kind]) === undefined && isGiven(valueAt(shared, [kind]))) ??
    'file'
  )
}

// Keys of `data` that are refused beside text.
const OF_IMAGES = ['classes', 'templates', 'image', 'label', 'head'] as const

/**
 * What the data at `path` state so that an expert reads the kind `chosen` although it inherits another one: null, or
 * the base's head, for each inherited key that is refused beside `chosen`.
 */
export function withoutInherited(content: unknown, path: Path, chosen: Kind): Record<string, unknown> {
  const shared = inherited(content, path)
  const refused = [...KINDS.filter((kind) => kind !== chosen), ...(chosen === 'images' ? [] : OF_IMAGES)]
  const given = refused.filter((key) => (valueAt(shared, [key]) ?? null) !== null)
  return Object.fromEntries(given.map((key) => [key, key === 'head' ? 'base' : null]))
}

/** What is wrong at `field`. An option of all experts is refused in each of them that does not state its own. */
export function errorAt(
  field: string,
  problems: readonly { field: string; message: string }[],
  content: unknown,
): string | undefined {
  const experts = Object.entries(valueAt(content, ['experts']) ?? {})
  const isOfAll = (refused: string) =>
    experts.some(
      ([alias, own]) => refused === `experts.${alias}.${field}` && valueAt(own, field.split('.')) === undefined,
    )
  return problems.find((problem) => problem.field === field || isOfAll(problem.field))?.message
}
