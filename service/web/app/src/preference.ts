/**
 * The trial of a front that weights of the objectives pick, while a slider moves. The server has the last word when a
 * model is exported; both are tested with the same cases (service/results/preference.py).
 */
import type { Objective } from './api/types'

/** A trial of a front with its values of the objectives, in the order of the objectives. */
export interface Choice {
  trial: number
  values: readonly number[]
}

// Weight of the sum in the augmented Chebyshev function.
const RHO = 0.05

/** Costs of a trial's values: 0 is the best value that an objective can take, 1 the worst. */
function costs(values: readonly number[], objectives: readonly Objective[]): number[] {
  return values.map((value, k) => {
    const { direction, range } = objectives[k]!
    const [low, high] = (range ?? [0, 1]) as [number, number]
    const share = (value - low) / (high - low)
    return direction === 'maximize' ? 1 - share : share
  })
}

/** The trial with the least augmented Chebyshev distance; undefined on an empty front. */
export function preferred(
  choices: readonly Choice[],
  objectives: readonly Objective[],
  weights: readonly number[],
): number | undefined {
  const all = choices.map((choice) => costs(choice.values, objectives))
  const least = weights.map((_, k) => Math.min(...all.map((own) => own[k]!)))
  const keys = all.map((own, i) => {
    const gaps = own.map((cost, k) => cost - least[k]!)
    const weighted = gaps.map((gap, k) => gap * weights[k]!)
    const distance = Math.max(...weighted) + RHO * sum(weighted)
    return [Math.round(distance * 1e12), sum(gaps), choices[i]!.trial] as const
  })
  return keys.toSorted((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2])[0]?.[2]
}

const sum = (values: readonly number[]) => values.reduce((a, b) => a + b, 0)
