import { expect, test } from 'vitest'
import { differences, lastWord, rowOf } from './recipes'

const at = (expert: string, layer: number | null, part: string, value: number) => ({ expert, layer, part, value })

test('coefficients are paired by expert, layer and component', () => {
  const a = [at('math', 10, 'mlp', 0.5), at('math', 2, 'mlp', 0.25), at('math', null, 'head', 1)]
  const b = [at('math', 10, 'mlp', 0.25), at('math', null, 'head', 1), at('text', 2, 'mlp', 1)]
  const { cells, across, up } = differences(a, b)
  expect(across).toEqual(['2', '10', 'head'])
  expect(up).toEqual(['math', 'math mlp', 'text mlp'])
  const found = Object.fromEntries(cells.map((cell) => [`${cell.row} ${cell.column}`, cell.difference]))
  expect(found).toEqual({ 'math mlp 10': 0.25, 'math mlp 2': null, 'math head': 0, 'text mlp 2': null })
})

test('a coefficient of a whole layer is that of each component', () => {
  const { cells } = differences([at('math', 0, '', 0.5)], [at('math', 0, 'mlp', 0.25), at('math', 0, 'norm', 1)])
  expect(cells.map(({ row, difference }) => [row, difference])).toEqual([
    ['math mlp', 0.25],
    ['math norm', -0.5],
  ])
})

test('a coefficient that all components share is that of each tensor', () => {
  const components = ['attention', 'mlp', 'norm']
  const whole = [
    ...components.map((part) => at('math', 0, part, 0.5)),
    ...components.map((part, k) => at('math', 1, part, k)),
    at('math', null, 'embedding', 0.5),
    at('math', null, 'head', 0.5),
  ]
  const single = [
    at('math', 0, 'self_attn.k_proj', 0.75),
    at('math', 0, 'mlp.up_proj', -0.25),
    at('math', 1, 'mlp.up_proj', 2),
    at('math', null, 'model.embed_tokens', 1),
  ]
  const said = (a: typeof whole, b: typeof whole) =>
    differences(a, b)
      .cells.filter(({ difference }) => difference !== null)
      .map(({ row, column, difference }) => [row, column, difference])
  expect(said(whole, single)).toEqual([
    ['math self_attn.k_proj', '0', -0.25],
    ['math mlp.up_proj', '0', 0.75],
    ['math', 'model.embed_tokens', -0.5],
  ])
  expect(said(single, whole).map(([, , difference]) => difference)).toEqual([0.25, -0.75, 0.5])
  expect(differences(whole, whole).cells).toHaveLength(8)
  expect(differences(whole, [at('math', 0, 'self_attn.k_proj', 1)]).across).toEqual(['0', '1', 'embedding', 'head'])
})

test('recipes without coefficients have no cells', () => {
  expect(differences([], []).cells).toEqual([])
})

test('charts have the last word of a tensor name', () => {
  expect(['model.embed_tokens', 'self_attn.k_proj', 'mlp'].map(lastWord)).toEqual(['embed_tokens', 'k_proj', 'mlp'])
  expect(['vision.layernorm.bias', 'vision.layernorm', 'bias', ''].map(lastWord)).toEqual([
    'layernorm.bias',
    'layernorm',
    'bias',
    '',
  ])
})

test('tensors outside of the layers have rows of their own', () => {
  const parts = ['embeddings.patch.projection.bias', 'layernorm.bias']
  expect(parts.map((part) => rowOf({ layer: null, part }))).toEqual(parts)
  expect(rowOf({ layer: 3, part: 'mlp' })).toBe('layer 3')
})
