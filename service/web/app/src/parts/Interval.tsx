import type { Estimate } from '../api/types'
import { interval, signed, value } from '../format'

/** A value with its 95 % interval, small beside it. */
export function Interval({ of: estimate }: { of: Estimate | undefined }) {
  if (estimate === undefined) return null
  return (
    <span title={`${estimate.samples} samples, standard error ${value(estimate.standard_error)}`}>
      {value(estimate.value)} <span className="interval">{interval(estimate.ci95[0]!, estimate.ci95[1]!)}</span>
    </span>
  )
}

/** A difference with its 95 % interval; soft if the interval contains 0. */
export function Difference({ of: estimate }: { of: Estimate | undefined }) {
  if (estimate === undefined) return null
  const [low, high] = estimate.ci95 as [number, number]
  return (
    <span className={low <= 0 && high >= 0 ? 'soft' : ''} title={`${estimate.samples} samples, paired`}>
      {signed(estimate.value)}{' '}
      <span className="interval">
        {signed(low)} to {signed(high)}
      </span>
    </span>
  )
}
