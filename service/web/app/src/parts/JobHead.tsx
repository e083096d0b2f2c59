import type { ReactNode } from 'react'
import type { Connection } from '../api/live'
import type { Study } from '../api/types'
import { State } from './State'

/** The words for the state of a connection. */
export const CONNECTIONS: Record<Connection, string> = {
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

/** What a job is for, why it ended, and what it waits for; below the name. */
export function JobNotes({ job }: { job: Pick<Study, 'description' | 'reason' | 'waiting_for'> }) {
  return (
    <>
      {job.description && <p className="soft">{job.description}</p>}
      {job.reason && <p>{job.reason}</p>}
      {job.waiting_for && <p>Waits: {job.waiting_for}</p>}
    </>
  )
}
