/** States of jobs, which all views read alike. */
import type { Study } from './types'

type Stateful = Pick<Study, 'state'>

const FINISHED: readonly Study['state'][] = ['COMPLETE', 'FAILED', 'CANCELLED']

/** Whether a job has ended. One that failed can be resumed. */
export const isFinished = ({ state }: Stateful) => FINISHED.includes(state)

// Seconds without a sign of life of a driver, which sends one every 5 s, after which the page says so.
const SILENT_S = 30

/** Seconds since the last sign of life of a running job's driver, if it is late; `now` is the server's time in ms. */
export function silence(job: Pick<Study, 'state' | 'heartbeat_at'>, now: number): number | undefined {
  if (job.state !== 'RUNNING' || job.heartbeat_at === null) return undefined
  const seconds = (now - Date.parse(job.heartbeat_at)) / 1000
  return seconds > SILENT_S ? seconds : undefined
}
