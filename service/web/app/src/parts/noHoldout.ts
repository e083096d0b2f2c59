import { isFinished } from '../api/jobs'
import type { Study, Summary } from '../api/types'

/** Why no trial of a study has values on held-out data, as a sentence. */
export function noHoldout(study: Pick<Study, 'state'>, summary: Pick<Summary, 'holdout_failures'>): string {
  if (summary.holdout_failures.length > 0) return 'All trials that were scored on held-out data failed there.'
  if (study.state === 'COMPLETE') return 'The study has no held-out data.'
  if (isFinished(study)) return 'The study ended before a trial was scored on held-out data.'
  return 'Trials are scored on held-out data when the search has ended.'
}
