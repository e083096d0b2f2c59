import { expect, test } from 'vitest'
import { type Input, canShow, entered, inputOf, kindsOf, property, resolved, shown } from './schema'

const SCHEMAS = {
  Space: {
    oneOf: [
      { properties: { kind: { const: 'dis' }, scales: { type: 'boolean' } } },
      { $ref: '#/components/schemas/Other' },
    ],
  },
  Other: { description: 'its own', properties: { kind: { const: 'lfs' } } },
  Study: {
    properties: {
      eta: { anyOf: [{ type: 'integer' }, { type: 'null' }], default: null, description: 'one in eta' },
      other: { $ref: '#/components/schemas/Other', default: 3 },
    },
  },
}

test('references and alternatives without null are resolved', () => {
  expect(property(SCHEMAS, SCHEMAS.Study, 'eta')).toEqual({
    type: 'integer',
    default: null,
    description: 'one in eta',
  })
  expect(property(SCHEMAS, SCHEMAS.Study, 'other')).toMatchObject({ description: 'its own', default: 3 })
  expect(resolved(SCHEMAS, { $ref: '#/components/schemas/Absent' })).toEqual({})
})

test('each kind of a section has its schema', () => {
  expect([...kindsOf(SCHEMAS, SCHEMAS.Space).keys()]).toEqual(['dis', 'lfs'])
})

test('inputs follow types', () => {
  expect(inputOf({ enum: ['a', 'b'], type: 'string' })).toEqual({ kind: 'choice', options: ['a', 'b'] })
  expect(inputOf({ type: 'array', items: { type: 'integer' } })).toEqual({ kind: 'list', isNumbers: true })
  expect(inputOf({ type: 'object' })).toBeNull()
})

test('what is entered is read back as it is shown', () => {
  for (const value of [3, 0.5, 1e-9]) expect(entered({ kind: 'number' }, shown(value))).toBe(value)
  expect(entered({ kind: 'list', isNumbers: true }, shown([30, 90]))).toEqual([30, 90])
  expect(entered({ kind: 'number' }, 'many')).toBe('many')
  expect(entered({ kind: 'text' }, ' ')).toBeUndefined()
})

test('a value that an input would change is not shown in it', () => {
  const list: Input = { kind: 'list', isNumbers: false }
  const lines: Input = { kind: 'lines' }
  for (const text of ['a {}, a pet', ' a', 'a ', '']) {
    expect(entered(list, shown(['x', text], list))).not.toEqual(['x', text])
    expect(canShow(list, ['x', text])).toBe(false)
  }
  expect(canShow(list, ['a\nb'])).toBe(false)
  expect(canShow(list, ['a photo of a {}.', 'b'])).toBe(true)
  for (const text of ['a {}, a pet', ' a', 'a ']) {
    expect(canShow(lines, ['x', text])).toBe(true)
    expect(entered(lines, shown(['x', text], lines))).toEqual(['x', text])
  }
  expect(canShow(lines, ['a\nb'])).toBe(false)
  expect(canShow({ kind: 'text' }, 'Q: {{q}}\nA:')).toBe(false)
  expect(canShow({ kind: 'text' }, undefined)).toBe(true)
  expect(canShow({ kind: 'text' }, { a: 1 })).toBe(false)
})
