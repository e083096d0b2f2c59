import type { Analysis } from '../../api/types'

type TaskVector = Analysis['fleets'][number]['task_vectors'][number]
type Fit = TaskVector['fits'][number]

/** Middles of a histogram's bins. */
export const middles = (edges: readonly number[]) => edges.slice(1).map((high, k) => (edges[k]! + high) / 2)

/**
 * Density at `x` of a fitted distribution with mean 0, of the elements that are not exactly 0, which a histogram of task
 * vectors leaves out.
 */
export function density({ distribution, scale, zeros }: Fit, x: number): number {
  const share = 1 - zeros
  if (distribution === 'laplace') return (share * Math.exp(-Math.abs(x) / scale)) / (2 * scale)
  return (share * Math.exp(-0.5 * (x / scale) ** 2)) / (scale * Math.sqrt(2 * Math.PI))
}
