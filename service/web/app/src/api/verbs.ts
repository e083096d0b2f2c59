import { isFinished } from './jobs'
import type { Study } from './types'

/** What of a job says which verbs the server accepts. */
export type Steered = Pick<Study, 'state' | 'waiting_for' | 'reason'>

export type VerbName = 'pause' | 'resume' | 'stop' | 'cancel'

/** A request that changes how a study continues; the same words as in the API and the commands. */
export interface Verb {
  name: VerbName
  /** What the verb does. */
  says: string
  isPermitted: (job: Steered) => boolean
}

export const VERBS: readonly Verb[] = [
  {
    name: 'pause',
    says: 'The samples that are being scored are stored; then the driver ends. The study continues when it is resumed.',
    isPermitted: (study) => !isFinished(study) && study.state !== 'PAUSED',
  },
  {
    name: 'resume',
    says: 'The study continues from its stored results. One that waits tries again now.',
    // The server says in the reason that samples of a complete study are void.
    isPermitted: ({ state, waiting_for: waits, reason }) =>
      state === 'PAUSED' ||
      state === 'FAILED' ||
      (state === 'COMPLETE' && reason !== null && reason.includes('are void')) ||
      ((state === 'CREATED' || state === 'STOPPED') && waits !== null),
  },
  {
    name: 'stop',
    says:
      'The search ends early: evaluations that run finish, and all other trials are pruned. Held-out data, benchmarks and ' +
      'verification follow as always. A search that was stopped cannot be taken up again.',
    isPermitted: (study) => !isFinished(study),
  },
  {
    name: 'cancel',
    says: 'The driver is ended now, and the study does not continue. Its results so far are kept.',
    isPermitted: (study) => !isFinished(study),
  },
]
