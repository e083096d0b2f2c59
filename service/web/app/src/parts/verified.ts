import type { Summary } from '../api/types'
import { count } from '../format'

/** The result of a verification as a sentence with a mark. */
export function verified(found: Summary['verification']): string {
  const { status, reason, trials, samples, equal } = found
  if (status === 'not verified') return `○ Not verified${reason ? `: ${reason}` : ''}`
  const compared = `${count(samples)} samples of ${trials} ${trials === 1 ? 'trial' : 'trials'} were scored again with transformers`
  if (status === 'disagreement') return `✕ Verification failed: ${compared}, and they differ`
  return `✓ Verified: ${compared}; ${count(equal)} are equal${equal < samples ? ', the others within the tolerance' : ''}`
}
