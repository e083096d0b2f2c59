import { KINDS } from './kinds'

/** What a stream tells: the kind of an event and its data, or `connection` and the state of the connection. */
export type Listener = (kind: string, data: string) => void

// Milliseconds until a stream that the server has refused, as while it restarts, is requested again.
const REOPEN_MS = 3000

/**
 * Follows the events of a job after the event `after`, until the job has ended or the returned function is called. A
 * lost connection is opened again from where it was. With `after` undefined, new events follow: those of all jobs.
 */
export function follow(address: string, after: number | undefined, on: Listener): () => void {
  let source: EventSource | undefined
  let timer: ReturnType<typeof setTimeout> | undefined
  let last = after
  const open = () => {
    const opened = new EventSource(last === undefined ? address : `${address}?after=${last}`)
    source = opened
    opened.onopen = () => on('connection', 'live')
    opened.onerror = () => {
      on('connection', 'reconnecting')
      // The browser connects again by itself, but not after an answer that is no stream.
      if (opened.readyState === EventSource.CLOSED) timer = setTimeout(open, REOPEN_MS)
    }
    for (const kind of KINDS) {
      opened.addEventListener(kind, (event) => {
        const { data, lastEventId } = event as MessageEvent<string>
        if (lastEventId) last = Number(lastEventId)
        if (kind === 'end') opened.close()
        on(kind, data)
        if (kind === 'end') on('connection', 'ended')
      })
    }
  }
  open()
  return () => {
    clearTimeout(timer)
    source?.close()
  }
}
