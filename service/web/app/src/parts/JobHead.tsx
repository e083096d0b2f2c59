import { type ReactNode, useEffect, useState } from 'react'
import { serverNow } from '../api/connection'
import { silence } from '../api/jobs'
import type { Connection } from '../api/live'
import type { Study } from '../api/types'
import { duration } from '../format'
import { State } from './State'

/** The words for the state of a connection. */
export const CONNECTIONS: Record<Connection, string> = {
  waiting: 'updated every few seconds',
  connecting: 'connecting',
  live: 'live',
  reconnecting: 'reconnecting: what is shown may be old',
  ended: 'no more changes',
}

/** State of a job, of the connection that brings its changes, the job's tags, and its menu; above the name. */
export function JobHead(props: { job: Pick<Study, 'state' | 'tags'>; connection: Connection; children?: ReactNode }) {
  const { job, connection, children } = props
  return (
    <div className="row">
      <State state={job.state} />
      <span className="soft" role="status" aria-label="Connection">
        {CONNECTIONS[connection]}
      </span>
      {job.tags.map((tag) => (
        <span key={tag} className="soft">
          #{tag}
        </span>
      ))}
      {children && <span style={{ marginLeft: 'auto' }}>{children}</span>}
    </div>
  )
}

/** That the driver of a running job has given no sign of life for some time; the seconds are not announced. */
function Silence({ job }: { job: Pick<Study, 'state' | 'heartbeat_at'> }) {
  const [now, setNow] = useState(serverNow)
  useEffect(() => {
    const timer = window.setInterval(() => setNow(serverNow()), 1000)
    return () => window.clearInterval(timer)
  }, [])
  const seconds = silence(job, now)
  return (
    <div role="status" aria-label="Driver">
      {seconds !== undefined && (
        <p>
          ⚠ The driver gives no sign of life{' '}
          <span role="timer" aria-live="off">
            for {duration(seconds)}
          </span>
          . If it has ended, the server starts another one.
        </p>
      )}
    </div>
  )
}

/** What a job is for, why it ended, and what it waits for; below the name. */
export function JobNotes(props: {
  job: Pick<Study, 'description' | 'reason' | 'waiting_for' | 'state' | 'heartbeat_at'>
}) {
  const { job } = props
  return (
    <>
      <Silence job={job} />
      {job.description && <p className="soft">{job.description}</p>}
      {job.reason && <p>{job.reason}</p>}
      {job.waiting_for && <p>Waits: {job.waiting_for}</p>}
    </>
  )
}
