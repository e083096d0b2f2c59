import { expect, test } from 'vitest'
import type { Objective } from './api/types'
import cases from './preference.cases.json'
import { preferred } from './preference'

// The server is tested with the same cases (tests/service/web/test_preference.py).
test.each(cases)('$name', ({ objectives, choices, weights, picked }) => {
  const trials = Object.entries(choices as unknown as Record<string, number[]>)
  const given = trials.map(([trial, values]) => ({ trial: Number(trial), values }))
  expect(preferred(given, objectives as unknown as Objective[], weights)).toBe(picked)
})

test('an empty front has no preferred trial', () => {
  expect(preferred([], [], [])).toBeUndefined()
})
