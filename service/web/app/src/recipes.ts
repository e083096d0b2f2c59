/** Differences between the coefficients of two recipes, as cells of a heat map. */
import type { components } from './api/schema'

type Coefficient = components['schemas']['Coefficient']

/** One coefficient in both recipes: null in a recipe that does not have it. */
export interface Cell {
  /** Expert and component of the layer. */
  row: string
  /** Number of the layer; outside of layers, the part of the model. */
  column: string
  a: number | null
  b: number | null
  difference: number | null
}

/** The last word of a tensor's name or the name of a component, which fit into a chart; of a bias the last two. */
export const lastWord = (part: string) => /[^.]+(\.bias)?$/.exec(part)?.[0] ?? part

/** The row of a coefficient in the heat map of one recipe: its layer, or outside of the layers its tensor. */
export const rowOf = ({ layer, part }: Pick<Coefficient, 'layer' | 'part'>) =>
  layer === null ? part : `layer ${layer}`

const name = (expert: string, layer: number | null, part: string) => JSON.stringify([expert, layer, part])

// All parts of a layer, and all parts outside of the layers, of a recipe without coefficients of single tensors.
const COMPONENTS = ['attention', 'mlp', 'norm']
const OUTSIDE = ['embedding', 'head']

/**
 * The coefficients of a recipe, those of an expert that all components of a layer share as one of the whole layer: for
 * a comparison with `others`, which name no component of the layer but tensors. The same holds outside of the layers.
 */
function merged(all: readonly Coefficient[], others: readonly Coefficient[]): readonly Coefficient[] {
  const placeOf = ({ expert, layer }: Coefficient) => name(expert, layer, '')
  const partsOf = (layer: number | null) => (layer === null ? OUTSIDE : COMPONENTS)
  const isComponent = ({ layer, part }: Coefficient) => partsOf(layer).includes(part)
  const named = new Set(others.filter(isComponent).map(placeOf))
  const inTensors = new Set(others.filter((c) => c.part !== '' && !isComponent(c)).map(placeOf))
  const found = new Map<string, Coefficient[]>()
  for (const each of all) found.set(placeOf(each), [...(found.get(placeOf(each)) ?? []), each])
  const isAlike = ([first, ...rest]: Coefficient[]) => rest.every(({ value }) => value === first!.value)
  return [...found].flatMap(([place, own]) => {
    const isWhole = own.length === partsOf(own[0]!.layer).length && own.every(isComponent)
    const isShared = isWhole && isAlike(own) && inTensors.has(place) && !named.has(place)
    return isShared ? [{ ...own[0]!, part: '' }] : own
  })
}

/**
 * The cells, and the heat map's columns and rows in order. A recipe with one coefficient for a whole layer has it for
 * each component or tensor of the layer; so has one whose components have all the same, against one of tensors.
 */
export function differences(own: readonly Coefficient[], others: readonly Coefficient[]) {
  const [a, b] = [merged(own, others), merged(others, own)]
  const [first, second] = [a, b].map((all) => new Map(all.map((c) => [name(c.expert, c.layer, c.part), c.value])))
  const valueIn = (values: Map<string, number>, { expert, layer, part }: Coefficient) =>
    values.get(name(expert, layer, part)) ?? values.get(name(expert, layer, '')) ?? null
  const isDivided = (all: readonly Coefficient[]) =>
    new Set(all.filter((c) => c.part !== '').map((c) => name(c.expert, c.layer, '')))
  const [dividedA, dividedB] = [isDivided(a), isDivided(b)]
  // Whole layers are left out where the other recipe has their components.
  const places = [
    ...a.filter((c) => c.part !== '' || !dividedB.has(name(c.expert, c.layer, ''))),
    ...b.filter((c) => c.part !== '' || !dividedA.has(name(c.expert, c.layer, ''))),
  ]
  const cells = new Map<string, Cell>()
  for (const place of places) {
    const { expert, layer, part } = place
    const [left, right] = [valueIn(first!, place), valueIn(second!, place)]
    cells.set(name(expert, layer, part), {
      row: layer === null ? expert : `${expert} ${part}`.trim(),
      column: layer === null ? part : `${layer}`,
      a: left,
      b: right,
      difference: left === null || right === null ? null : left - right,
    })
  }
  const columns = [...new Set([...cells.values()].map((cell) => cell.column))]
  const layers = columns.filter((column) => /^\d+$/.test(column)).toSorted((x, y) => Number(x) - Number(y))
  const rows = [...new Set([...cells.values()].map((cell) => cell.row))].toSorted()
  return {
    cells: [...cells.values()],
    across: [...layers, ...columns.filter((column) => !layers.includes(column))],
    up: rows,
  }
}
