import { expect, test } from 'vitest'
import { noHoldout } from './noHoldout'

test('a study says why no trial has values on held-out data', () => {
  const said = (state: 'COMPLETE' | 'CANCELLED' | 'FAILED' | 'RUNNING' | 'PAUSED', failures = 0) =>
    noHoldout({ state }, { holdout_failures: Array(failures).fill({ trial: 3, reason: 'NaN' }) })
  expect(said('COMPLETE')).toBe('The study has no held-out data.')
  expect(said('COMPLETE', 2)).toBe('All trials that were scored on held-out data failed there.')
  for (const state of ['CANCELLED', 'FAILED'] as const)
    expect(said(state)).toBe('The study ended before a trial was scored on held-out data.')
  for (const state of ['RUNNING', 'PAUSED'] as const) expect(said(state)).toMatch(/when the search has ended/)
})
