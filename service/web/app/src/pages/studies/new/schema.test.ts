import { expect, test } from 'vitest'
import { entered, inputOf, kindsOf, property, resolved, shown } from './schema'

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
