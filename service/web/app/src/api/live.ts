import { type Query, useQueryClient } from '@tanstack/react-query'
import { useEffect, useRef, useState } from 'react'
import { BASE, Refused } from './client'
import type { Heard, Said } from './events.worker'
import type { components } from './schema'
import { type Listener, follow } from './stream'
import type { Progress } from './types'

/**
 * State of the connection over which a view receives changes. One that is `waiting` opens once another tab's is closed.
 */
export type Connection = 'waiting' | 'connecting' | 'live' | 'reconnecting' | 'ended'

// Milliseconds between refetches of what events have made outdated.
const REFETCH_MS = 2000

// Milliseconds between refetches while there is no connection that tells of changes.
const POLL_MS = 15_000

let port: MessagePort | undefined

/** Calls `on` with every event after `after` of the stream at `address`, until the returned function is called. */
function listen(address: string, after: number | undefined, on: Listener): () => void {
  if (typeof SharedWorker === 'undefined') return listenAlone(address, after, on)
  port ??= new SharedWorker(new URL('./events.worker.ts', import.meta.url), { type: 'module', name: 'events' }).port
  const own = port
  const say = (what: Said) => own.postMessage(what)
  const hear = ({ data }: MessageEvent<Heard>) => {
    if (data.address === address) on(data.kind, data.data)
  }
  const join = () => say({ join: address, after })
  const leave = () => say({ leave: address })
  const show = (event: PageTransitionEvent) => {
    if (event.persisted) join() // the browser shows the page again as it was left
  }
  own.addEventListener('message', hear)
  own.start()
  join()
  addEventListener('pagehide', leave)
  addEventListener('pageshow', show)
  return () => {
    removeEventListener('pagehide', leave)
    removeEventListener('pageshow', show)
    own.removeEventListener('message', hear)
    leave()
  }
}

/** The same without a SharedWorker: a stream of this tab, only while the tab is visible. */
function listenAlone(address: string, after: number | undefined, on: Listener): () => void {
  let close: (() => void) | undefined
  const update = () => {
    close?.()
    close = document.hidden ? undefined : follow(address, after, on)
  }
  update()
  document.addEventListener('visibilitychange', update)
  return () => {
    document.removeEventListener('visibilitychange', update)
    close?.()
  }
}

const isAbsent = (error: unknown) => error instanceof Refused && error.problem.status === 404

/** What tables that are not refetched miss: trials that are new, and others that have changed. */
export interface Changes {
  newTrials: number
}

// Kinds of events that change a table of trials.
const TRIAL_KINDS = new Set(['trial', 'rung', 'trial_state'])

/** What the stream of all jobs tells of one job's progress. */
type JobProgress = components['schemas']['JobProgressDocument']

/**
 * Follows all jobs: queries whose key begins with `key` are refetched after events, at most once in two seconds, and
 * `onProgress` gets the progress of a job of the given kind. Returns the state of the connection.
 */
export function useLiveJobs(kind: string, key: string, onProgress: (told: JobProgress) => void): Connection {
  const client = useQueryClient()
  const [connection, setConnection] = useState<Connection>('connecting')
  const told = useRef(onProgress)
  useEffect(() => {
    told.current = onProgress
  })
  useEffect(() => {
    const queryKey = [key]
    let timer: number | undefined
    const refetch = () => {
      timer = undefined
      if (client.isFetching({ queryKey }) > 0) outdate()
      else client.invalidateQueries({ queryKey })
    }
    const outdate = () => {
      timer ??= window.setTimeout(refetch, REFETCH_MS)
    }
    const stop = listen(new URL(`${BASE}/v1/events`, location.href).href, undefined, (heard, data) => {
      if (heard === 'connection') {
        setConnection(data as Connection)
        if (data === 'live') outdate()
      } else if (heard === 'progress') {
        const found: JobProgress = JSON.parse(data)
        if (found.job_kind === kind) told.current(found)
      } else if (heard !== 'start') outdate()
    })
    return () => {
      stop()
      window.clearTimeout(timer)
    }
  }, [client, key, kind])
  return connection
}

/**
 * Follows a job: its latest progress, and the state of the connection. Queries whose key begins with `key` are
 * refetched after events, at most once in two seconds and not while they are fetched. `after` is the id of the last
 * event that the page knows; undefined as long as the page does not follow the job.
 *
 * Tables that are shown, whose keys go on with the word `held`, are not refetched: rows would move under the reader.
 * Then `changes` says what they miss, and `show` refetches them.
 *
 * Without a connection the queries are refetched every 15 s.
 */
export function useLive<P = Progress>(
  path: string,
  key: readonly unknown[],
  after: number | undefined,
  held?: string,
): { progress: P | null; connection: Connection; changes: Changes | null; show: () => void } {
  const client = useQueryClient()
  const [changes, setChanges] = useState<Changes | null>(null)
  const [told, setTold] = useState<{ path: string; progress: P }>()
  const [connection, setConnection] = useState<Connection>('connecting')
  // The stream continues from its own position, so that a later `after` does not begin another one, unless the stream
  // has ended: then the job has continued.
  const [start, setStart] = useState<{ path: string; after: number }>()
  const isOver = start?.path !== path || (connection === 'ended' && after !== undefined && after > start.after)
  if (after !== undefined && isOver) setStart({ path, after })
  const name = JSON.stringify(key)
  const newest = useRef(after)
  useEffect(() => {
    newest.current = after
  })
  useEffect(() => {
    if (start === undefined) return
    const queryKey = JSON.parse(name)
    const isHeld = (query: Query) => held !== undefined && query.queryKey[queryKey.length] === held && query.isActive()
    let timer: number | undefined
    const refetch = () => {
      timer = undefined
      // A query that is invalidated while it is fetched begins anew; a slow one would never end.
      if (client.isFetching({ queryKey }) > 0) outdate()
      else client.invalidateQueries({ queryKey, predicate: (query) => !isHeld(query) })
    }
    const outdate = () => {
      timer ??= window.setTimeout(refetch, REFETCH_MS)
    }
    const hasHeld = () => client.getQueryCache().findAll({ queryKey, predicate: isHeld }).length > 0
    let state: Connection = 'connecting'
    // The last event before what the tables show, as far as it is known without a connection.
    let shown = start.after
    const poll = window.setInterval(() => {
      if (state === 'live' || state === 'ended') return
      const last = newest.current ?? shown
      if (last > shown && hasHeld()) setChanges((old) => old ?? { newTrials: 0 })
      shown = last
      outdate()
    }, POLL_MS)
    const address = new URL(`${BASE}${start.path}/events`, location.href).href
    const stop = listen(address, start.after, (kind, data) => {
      if (kind === 'connection') {
        state = data as Connection
        setConnection(state)
        if (data === 'waiting') setTold(undefined) // what is polled is newer
        if (data === 'live' || data === 'ended') outdate()
        else if (data === 'reconnecting') {
          // A job that was deleted has no stream: reading the job says so.
          if (isAbsent(client.getQueryState(queryKey)?.error)) stop()
          else client.invalidateQueries({ queryKey, exact: true })
        }
      } else if (kind === 'progress') setTold({ path: start.path, progress: JSON.parse(data) })
      else {
        outdate()
        if (TRIAL_KINDS.has(kind) && hasHeld())
          setChanges((old) => ({ newTrials: (old?.newTrials ?? 0) + (kind === 'trial' ? 1 : 0) }))
      }
    })
    return () => {
      stop()
      window.clearInterval(poll)
      window.clearTimeout(timer)
    }
  }, [client, start, name, held])
  const show = () => {
    setChanges(null)
    client.invalidateQueries({ queryKey: [...key, held] })
  }
  return { progress: told?.path === path ? told.progress : null, connection, changes, show }
}
