import type { Plots } from '../../api/queries'

export type PoliciesPlot = Pick<Extract<Plots, { plot: 'policies' }>, 'policies'>

/** A chart of one number of each policy over its iterations, counted from 1. */
export interface PolicyChart {
  label: string
  /** The name of the vertical axis. */
  name: string
  lines: { policy: string; points: [turn: number, value: number][] }[]
}

type Iteration = PoliciesPlot['policies'][number]['iterations'][number]

// The charts of the report, in its order.
const CHARTS: { label: string; name: string; of: (iteration: Iteration) => number | undefined }[] = [
  { label: 'Mean outcome of the trials of an iteration', name: 'outcome', of: ({ outcome }) => outcome },
  { label: 'KL divergence of an update, nats per step', name: 'KL divergence', of: ({ statistics }) => statistics.kl },
  {
    label: 'Share of ratios outside the clip after an update',
    name: 'share clipped',
    of: ({ statistics }) => statistics.clipped,
  },
]

/** The charts of a study's policies; none for a number that no update has, and none at all without an iteration. */
export function policyCharts({ policies }: PoliciesPlot): PolicyChart[] {
  return CHARTS.map(({ of, ...chart }) => ({
    ...chart,
    lines: policies.map(({ name, iterations }) => ({
      policy: name,
      points: iterations.flatMap((iteration, k): [number, number][] => {
        const found = of(iteration)
        return found === undefined ? [] : [[k + 1, found]]
      }),
    })),
  })).filter(({ lines }) => lines.some(({ points }) => points.length > 0))
}
