import type { Curves } from '../../api/types'

type Expert = Curves['experts'][number]

/** A curve of an expert: its points, and what they are measured on where an expert may have two curves. */
export interface Line {
  expert: string
  /** The number of the expert, which has a colour. */
  index: number
  at?: string
  isSecond?: boolean
  points: [step: number, value: number][]
}

export const AT_OFFSET = 'at the offset'
export const AT_WEIGHTS = 'at the weights'
export const LINEARIZED = 'linearized'

/** The name of a line in a legend, such as `math, at the offset`. */
export const nameOf = ({ expert, at }: Pick<Line, 'expert' | 'at'>) => (at === undefined ? expert : `${expert}, ${at}`)

/**
 * The losses of each expert where gradients are computed and, if they were measured too, at the weights (mergopt) or at
 * the offset (sam and asam).
 */
export function lossLines(
  experts: readonly Pick<Expert, 'expert' | 'loss' | 'loss_at' | 'weights_loss' | 'offset_loss'>[],
): Line[] {
  return experts.flatMap(({ expert, loss, loss_at: place, weights_loss: atWeights, offset_loss: atOffset }, index) => {
    const isMoved = place === 'offset'
    const second = isMoved ? atWeights : atOffset
    const line = (points: Expert['loss']) => ({
      expert,
      index,
      points: points.map((p): [number, number] => [p.step, p.loss]),
    })
    const first: Line = isMoved ? { ...line(loss), at: AT_OFFSET } : line(loss)
    return second.length === 0
      ? [first]
      : [first, { ...line(second), at: isMoved ? AT_WEIGHTS : AT_OFFSET, isSecond: true }]
  })
}

/** The values of an objective of each expert and, of the method tangent, those of the linearized model it trains. */
export function valueLines(name: string, experts: readonly Pick<Expert, 'expert' | 'evaluations'>[]): Line[] {
  return experts.flatMap(({ expert, evaluations }, index) => {
    const points = (key: 'values' | 'linearized_values') =>
      evaluations.flatMap(({ step, [key]: values }): [number, number][] =>
        values?.[name] === undefined ? [] : [[step, values[name]]],
      )
    const linearized = points('linearized_values')
    const line: Line = { expert, index, points: points('values') }
    return linearized.length === 0
      ? [line]
      : [line, { expert, index, at: LINEARIZED, isSecond: true, points: linearized }]
  })
}
