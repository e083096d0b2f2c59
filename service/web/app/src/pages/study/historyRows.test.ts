import { expect, test } from 'vitest'
import { grouped, rowsOf, text } from './historyRows'

const TRIALS = {
  number: [0, 1],
  label: ['trial 0', 'merged'],
  rung: [0, 1],
  samples: [1, 50],
  origin: ['search', 'search'],
  'value.math': [1, 0.5],
  'value.text': [0, 0.7],
  'standard_error.math': [null, 0.03],
  'standard_error.text': [0.1, 0.04],
}

test('an unknown standard error is not 0', () => {
  const [one, many] = rowsOf(TRIALS, undefined, ['math', 'text'])
  expect([one!.error, many!.error]).toEqual([null, 0.025])
  expect(text(one, 'mean')).toBe('trial 0: mean 0.500 on 1 sample')
  expect(text(many, 'mean')).toBe('trial 1 (merged): mean 0.600 ± 0.025 on 50 samples')
})

test('trials outside the ranges are a group of their own; baselines are not', () => {
  const baseline = { ...TRIALS, number: [2, 3], rung: [1, 1], origin: ['source', 'published'] }
  const rows = [...rowsOf(TRIALS, undefined, ['math']), ...rowsOf(baseline, undefined, ['math'])]
  const trials = (selected?: Set<number>) => grouped(rows, [0, 1], selected).map((group) => group.map((r) => r.trial))
  expect(trials()).toEqual([[0], [1], [2, 3], []])
  expect(trials(new Set([0]))).toEqual([[0], [], [2, 3], [1]])
  expect(trials(new Set())).toEqual([[], [], [2, 3], [0, 1]])
})
