import { expect, test } from 'vitest'
import { density, middles } from './density'

const fit = { distance: 0, log_likelihood: 0, num_elements: 1, zeros: 0.5 }

test('fitted densities are those of the distributions, times the share of elements that are not 0', () => {
  const laplace = { ...fit, distribution: 'laplace' as const, scale: 2 }
  expect(density(laplace, 0)).toBeCloseTo(0.5 / 4)
  expect(density(laplace, -2)).toBeCloseTo((0.5 / 4) * Math.exp(-1))
  const gaussian = { ...fit, distribution: 'gaussian' as const, scale: 2 }
  expect(density(gaussian, 0)).toBeCloseTo(0.5 * 0.19947)
  expect(density(gaussian, 2)).toBeCloseTo(0.5 * 0.12099)
})

test('bins have a middle each', () => {
  expect(middles([-1, 0, 3])).toEqual([-0.5, 1.5])
  expect(middles([])).toEqual([])
})
