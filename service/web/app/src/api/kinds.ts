/** Kinds of the events of a job, as the server's `EventKind` lists them, with those that a stream adds. */
// prettier-ignore
export const KINDS = [
  'created', 'attempt', 'state', 'waiting', 'resumed', 'steered', 'preempted', 'job_refused', 'trial', 'rung',
  'trial_state', 'replica', 'crash', 'actors', 'database', 'search_note', 'search_ended', 'stopping',
  'holdout_started', 'holdout_scored', 'holdout_failed', 'benchmarks_added', 'benchmarks_started', 'benchmark_scored',
  'benchmark_failed', 'out_of_range', 'verification', 'engine_fault', 'scored_again', 'texts_deleted', 'canaries',
  'training', 'study', 'analysis', 'responses_removed', 'endpoint', 'answered', 'progress', 'end', 'start', 'added',
  'removed',
]
