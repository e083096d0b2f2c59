import { expect, test } from 'vitest'
import { errorAt, kindOf, withoutInherited } from './fleet'

const PATH = ['experts', 'a', 'data']
const fleet = (shared: object, own?: object) => ({ data: shared, experts: { a: { data: own } } })

test('the kind of the data of an expert is its own, or that of all experts', () => {
  expect(kindOf(fleet({ images: '/x' }), PATH)).toBe('images')
  expect(kindOf(fleet({ images: '/x' }, { head: 'new' }), PATH)).toBe('images')
  expect(kindOf(fleet({ images: '/x' }, { dataset: 'y' }), PATH)).toBe('dataset')
  expect(kindOf(fleet({ images: '/x' }, { images: null, file: '' }), PATH)).toBe('file')
  expect(kindOf({ data: { images: '/x' } }, ['data'])).toBe('images')
  expect(kindOf({ data: { images: null, dataset: null, file: '/x' } }, ['data'])).toBe('file')
})

test('an expert of another kind states that it has none of the inherited one', () => {
  const shared = { images: '/x', head: 'new', classes: null, max_length: 5 }
  expect(withoutInherited(fleet(shared), PATH, 'file')).toEqual({ images: null, head: 'base' })
  expect(withoutInherited(fleet({ file: '/x', head: 'new' }), PATH, 'images')).toEqual({ file: null })
  expect(withoutInherited({ data: shared }, ['data'], 'file')).toEqual({})
})

test('a problem of an expert is at the option of all experts only if the expert has none of its own', () => {
  const problems = [{ field: 'experts.v1.5.training.steps', message: 'wrong' }]
  const content = (own: object) => ({ training: { steps: 3 }, experts: { 'v1.5': own } })
  expect(errorAt('experts.v1.5.training.steps', problems, content({ training: { steps: 0 } }))).toBe('wrong')
  expect(errorAt('training.steps', problems, content({ training: { steps: 0 } }))).toBeUndefined()
  expect(errorAt('training.steps', problems, content({ training: { epochs: 1 } }))).toBe('wrong')
  expect(errorAt('training.steps', problems, content({}))).toBe('wrong')
  expect(errorAt('steps', problems, content({}))).toBeUndefined()
})
