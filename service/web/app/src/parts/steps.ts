import type { Progress } from '../api/types'

/** The steps of a study's searcher (gradient steps, policy updates) and their expected number; null if it makes none. */
export function stepsOf(
  progress: Pick<Progress, 'steps' | 'steps_planned'> | null,
): { made: number; planned: number } | null {
  const planned = progress?.steps_planned // earlier versions reported none
  return planned ? { made: progress?.steps ?? 0, planned } : null
}
