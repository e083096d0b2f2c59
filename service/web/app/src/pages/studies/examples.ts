import type { paths } from '../../api/schema'

type Name = NonNullable<NonNullable<paths['/v1/studies:example']['get']['parameters']['query']>['name']>

/** The study files that are shipped, which merge the shipped models; the first is the usual one. */
export const EXAMPLES: readonly { name: Name; label: string }[] = [
  { name: 'study', label: 'gradient descent of one coefficient per expert and tensor: 4 trials' },
  { name: 'front', label: 'a front of three objectives from few samples: 11 trials' },
  { name: 'lfs', label: 'a search by scores alone, with Hyperband: 120 trials' },
]
