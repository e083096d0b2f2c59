import { expect, test } from 'vitest'
import { stepsOf } from './steps'

test('a study whose searcher makes steps has their numbers, from the first on', () => {
  expect(stepsOf({ steps: 12, steps_planned: 60 })).toEqual({ made: 12, planned: 60 })
  expect(stepsOf({ steps: 0, steps_planned: 60 })).toEqual({ made: 0, planned: 60 })
})

test('a study without steps, without progress or of an earlier version has none', () => {
  expect(stepsOf({ steps: 0, steps_planned: 0 })).toBeNull()
  expect(stepsOf({})).toBeNull()
  expect(stepsOf(null)).toBeNull()
})
