import type { Expert, Finetune, TrainingProgress } from '../../api/types'

/** The share of all experts' updates that are done; an expert that has not begun counts as none. */
export function shareDone(experts: Readonly<Record<string, Pick<Expert, 'progress' | 'bytes'>>>): number {
  const shares = Object.values(experts).map(({ progress, bytes }) => {
    if (bytes !== null) return 1
    return progress === null || progress.steps === 0 ? 0 : Math.min(1, progress.step / progress.steps)
  })
  return shares.length === 0 ? 0 : shares.reduce((a, b) => a + b, 0) / shares.length
}

/** A fine-tuning with the progress that an event stream has brought since it was read. */
export function withProgress(stored: Finetune, progress: TrainingProgress | null): Finetune {
  if (progress === null) return stored
  const experts = Object.entries(stored.experts).map(
    ([alias, expert]) => [alias, { ...expert, progress: progress.experts[alias] ?? expert.progress }] as const,
  )
  return { ...stored, experts: Object.fromEntries(experts) }
}
