import type { QueueEntry } from '../../api/types'

/** A move of a waiting job before another one, or to the front of the jobs of its priority. */
export interface Move {
  verb: 'First' | 'Earlier' | 'Later'
  job: string
  before?: string
  /** What is said when it is done. */
  words: string
}

/** The moves of a job among the waiting jobs of its priority, which alone may change places. */
export function movesOf(entries: readonly QueueEntry[], entry: QueueEntry): Move[] {
  const own = entry.job
  if (own === null) return []
  const peers = entries.flatMap(({ job }) => (job !== null && job.priority === own.priority ? [job] : []))
  const at = peers.findIndex(({ id }) => id === own.id)
  const earlier = peers[at - 1]
  const later = peers[at + 1]
  const moves: Move[] = []
  if (at > 1) moves.push({ verb: 'First', job: own.id, words: `${own.name} is the first of its priority.` })
  if (earlier)
    moves.push({ verb: 'Earlier', job: own.id, before: earlier.id, words: `${own.name} is before ${earlier.name}.` })
  // The API moves jobs to the front only: the next job moves before this one.
  if (later) moves.push({ verb: 'Later', job: later.id, before: own.id, words: `${own.name} is after ${later.name}.` })
  return moves
}
