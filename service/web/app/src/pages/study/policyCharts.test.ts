import { expect, test } from 'vitest'
import { policyCharts } from './policyCharts'

const iteration = (number: number, outcome: number, statistics: Record<string, number>) => ({
  iteration: number,
  outcome,
  outcome_std: 0,
  length: 7,
  statistics,
})

test('each number of the updates has a chart with a line for each policy', () => {
  const charts = policyCharts({
    policies: [
      {
        name: 'policy 0',
        preference: {},
        iterations: [iteration(0, 0.1, { kl: 0.01, clipped: 0.2 }), iteration(2, 0.3, { kl: 0.02, clipped: 0.1 })],
      },
      { name: 'policy 1', preference: {}, iterations: [iteration(1, 0.2, { kl: 0.03, clipped: 0 })] },
    ],
  })
  const points = (...found: [number, number][]) => found
  expect(charts.map(({ name, lines }) => [name, ...lines.map((line) => line.points)])).toEqual([
    ['outcome', points([1, 0.1], [2, 0.3]), points([1, 0.2])],
    ['KL divergence', points([1, 0.01], [2, 0.02]), points([1, 0.03])],
    ['share clipped', points([1, 0.2], [2, 0.1]), points([1, 0])],
  ])
})

test('what no update has, as in studies of earlier versions, has no chart', () => {
  const plot = { policies: [{ name: 'policy 0', preference: {}, iterations: [iteration(0, 0.1, { kl: 0.01 })] }] }
  expect(policyCharts(plot).map(({ name }) => name)).toEqual(['outcome', 'KL divergence'])
  expect(policyCharts({ policies: [] })).toEqual([])
})
