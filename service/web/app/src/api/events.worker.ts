import { follow } from './stream'

/**
 * Holds one event stream per job for all tabs of a browser, which opens at most six connections to a server over
 * HTTP/1.1. A tab says `{ join: address, after }` or `{ leave: address }`; it receives `{ address, kind, data }`.
 */
export type Said = { join: string; after: number | undefined } | { leave: string }
export type Heard = { address: string; kind: string; data: string }

interface Stream {
  ports: Set<MessagePort>
  state: string
  close: () => void
}

const streams = new Map<string, Stream>()

function opened(address: string, after: number | undefined): Stream {
  const stream: Stream = { ports: new Set(), state: 'connecting', close: () => {} }
  streams.set(address, stream)
  stream.close = follow(address, after, (kind, data) => {
    if (kind === 'connection') stream.state = data
    for (const port of stream.ports) port.postMessage({ address, kind, data } satisfies Heard)
    // A job may continue after its end: then a tab joins anew.
    if (stream.state === 'ended') streams.delete(address)
  })
  return stream
}

// A tab that joins a stream later has read the job later, and reads it again when it hears that the stream is live.
function join(address: string, after: number | undefined, port: MessagePort) {
  const stream = streams.get(address) ?? opened(address, after)
  stream.ports.add(port)
  port.postMessage({ address, kind: 'connection', data: stream.state } satisfies Heard)
}

function leave(address: string, port: MessagePort) {
  const stream = streams.get(address)
  stream?.ports.delete(port)
  if (stream?.ports.size !== 0) return
  stream.close()
  streams.delete(address)
}

;(self as unknown as { onconnect: (event: MessageEvent) => void }).onconnect = (event) => {
  const port = event.ports[0]!
  port.onmessage = ({ data }: MessageEvent<Said>) =>
    'join' in data ? join(data.join, data.after, port) : leave(data.leave, port)
}
