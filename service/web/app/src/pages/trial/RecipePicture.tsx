import { type CSSProperties, useState } from 'react'
import type { RecipePlot } from '../../api/types'
import { type Palette, usePalette } from '../../charts/palette'
import { value } from '../../format'

type Merge = NonNullable<RecipePlot['embedding']>
type Run = RecipePlot['layers'][number]

const COMPONENTS = ['attention', 'mlp', 'norm'] as const

/** The colour of each model: grey for the base, then those of the experts in the order of the study file. */
function coloursOf(p: Palette, plot: RecipePlot, experts: readonly string[]): Map<string, string> {
  const others = plot.models.filter((model) => model !== 'base' && !experts.includes(model))
  const coloured = [...experts, ...others].map(
    (model, k) => [model, p.experts[k % p.experts.length]!] as [string, string],
  )
  return new Map([['base', p.soft], ...coloured])
}

/** The recipe as runs of layers that are merged alike: method, numbers, and every model's share of each component. */
export function RecipePicture({ plot, experts }: { plot: RecipePlot; experts: readonly string[] }) {
  const palette = usePalette()
  const colours = coloursOf(palette, plot, experts)
  const used = [...colours.keys()].filter((model) => allOf(plot).some((merge) => model in merge.shares))
  const tensors = Object.entries(plot.tensors)
  return (
    <>
      <Legend models={used} colours={colours} />
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Recipe by layers and components">
        <table className="recipe">
          <thead>
            <tr>
              <th scope="col">part</th>
              {COMPONENTS.map((component) => (
                <th key={component} scope="col">
                  {component}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {plot.embedding && <Row name="embedding" merges={[plot.embedding]} colours={colours} />}
            {plot.layers.map((run) => (
              <Row key={run.first} name={nameOf(run)} note={scalesOf(run)} merges={mergesOf(run)} colours={colours} />
            ))}
            {plot.head && <Row name="head" merges={[plot.head]} colours={colours} />}
          </tbody>
        </table>
      </div>
      {tensors.length > 0 && <Tensors tensors={tensors} colours={colours} />}
    </>
  )
}

/** Tensors that are merged differently from their component, closed until they are opened: there may be hundreds. */
function Tensors({ tensors, colours }: { tensors: [string, Merge][]; colours: Map<string, string> }) {
  const [isOpen, setIsOpen] = useState(false)
  const is =
    tensors.length === 1 ? '1 tensor has a merge of its own' : `${tensors.length} tensors have merges of their own`
  return (
    <details onToggle={(event) => setIsOpen(event.currentTarget.open)}>
      <summary className="soft">{is}; the rows above show the other tensors of each part</summary>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Tensors with merges of their own">
        <table className="recipe tensors">
          <tbody>
            {isOpen &&
              tensors.map(([name, merge]) => <Row key={name} name={name} merges={[merge]} colours={colours} />)}
          </tbody>
        </table>
      </div>
    </details>
  )
}

function allOf(plot: RecipePlot): Merge[] {
  const inLayers = plot.layers.flatMap((run) => Object.values(run.components))
  return [plot.embedding, plot.head, ...inLayers, ...Object.values(plot.tensors)].filter((merge) => merge !== null)
}

const nameOf = ({ first, last }: Run) => (first === last ? `layer ${first}` : `layers ${first} to ${last}`)

const scalesOf = (run: Run) =>
  [run.scale !== 1 && `scale ${value(run.scale)}`, run.mlp_scale !== 1 && `scale of the MLP ${value(run.mlp_scale)}`]
    .filter(Boolean)
    .join(', ')

/** The merges of a run's components; a single one where all components are merged alike. */
function mergesOf(run: Run): Merge[] {
  const merges = COMPONENTS.map((component) => run.components[component]!)
  const texts = new Set(merges.map((merge) => JSON.stringify(merge)))
  return texts.size === 1 ? merges.slice(0, 1) : merges
}

function Legend({ models, colours }: { models: string[]; colours: Map<string, string> }) {
  return (
    <ul className="legend" aria-label="Models">
      {models.map((model) => (
        <li key={model} style={{ '--s': colours.get(model) } as CSSProperties}>
          {model}
        </li>
      ))}
    </ul>
  )
}

function Row(props: { name: string; note?: string; merges: Merge[]; colours: Map<string, string> }) {
  const { name, note, merges, colours } = props
  return (
    <tr>
      <th scope="row">
        {name}
        {note && <small>{note}</small>}
      </th>
      {merges.map((merge, k) => (
        <td key={COMPONENTS[k]} colSpan={merges.length === 1 ? COMPONENTS.length : 1}>
          <Cell merge={merge} colours={colours} />
        </td>
      ))}
    </tr>
  )
}

const SYMBOLS: Record<string, string> = { lambda: 'λ' }

function Cell({ merge, colours }: { merge: Merge; colours: Map<string, string> }) {
  const numbers = Object.entries(merge.coefficients).flatMap(([name, x]) =>
    Array.isArray(x) ? [] : [`${SYMBOLS[name] ?? name} ${value(x)}`],
  )
  const lists = Object.values(merge.coefficients).filter((x) => Array.isArray(x))
  return (
    <>
      <div className="method">
        {merge.method.replaceAll('_', ' ')} <span>{numbers.join(', ')}</span>
      </div>
      <div className="stack" aria-hidden="true">
        {[...colours].map(([model, colour]) => (
          <i key={model} style={{ flexGrow: merge.shares[model] ?? 0, background: colour }} />
        ))}
      </div>
      <ul className="legend">
        {merge.sources.map((model, k) => (
          // A model may be an operand several times, with other layers.
          // oxlint-disable-next-line react/no-array-index-key
          <li key={k} style={{ '--s': colours.get(model) } as CSSProperties}>
            {model} {lists.map((list) => value(list[k])).join(' ')}
          </li>
        ))}
      </ul>
    </>
  )
}
