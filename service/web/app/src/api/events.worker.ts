import { follow } from './stream'

/**
 * Holds one event stream per job for all tabs of a browser, and at most `MAX_OPEN` of them at a time; the jobs that
 * were joined later wait. A tab says `{ join: address, after }` or `{ leave: address }`; it receives
 * `{ address, kind, data }`.
 */
export type Said = { join: string; after: number | undefined } | { leave: string }
export type Heard = { address: string; kind: string; data: string }

interface Stream {
  ports: Set<MessagePort>
  after: number | undefined
  state: string
  /** Undefined as long as the stream waits for another one to close. */
  close: (() => void) | undefined
}

// A browser opens at most six connections to a server over HTTP/1.1: two are left for requests.
const MAX_OPEN = 4

const streams = new Map<string, Stream>()

function tell({ ports }: Stream, heard: Heard) {
  for (const port of ports) port.postMessage(heard)
}

function open(address: string, stream: Stream) {
  stream.state = 'connecting'
  tell(stream, { address, kind: 'connection', data: stream.state })
  stream.close = follow(address, stream.after, (kind, data) => {
    if (kind === 'connection') stream.state = data
    tell(stream, { address, kind, data })
    if (stream.state !== 'ended') return
    // A job may continue after its end: then a tab joins anew.
    streams.delete(address)
    fill()
  })
}

/** Opens streams that wait, the earliest first, as far as there is room. */
function fill() {
  let room = MAX_OPEN - [...streams.values()].filter(({ close }) => close !== undefined).length
  for (const [address, stream] of streams) {
    if (room <= 0) return
    if (stream.close !== undefined) continue
    open(address, stream)
    room -= 1
  }
}

// A tab that joins a stream later has read the job later, and reads it again when it hears that the stream is live.
function join(address: string, after: number | undefined, port: MessagePort) {
  const stream = streams.get(address) ?? { ports: new Set(), after, state: 'waiting', close: undefined }
  streams.set(address, stream)
  stream.ports.add(port)
  port.postMessage({ address, kind: 'connection', data: stream.state } satisfies Heard)
  fill()
}

function leave(address: string, port: MessagePort) {
  const stream = streams.get(address)
  stream?.ports.delete(port)
  if (stream?.ports.size !== 0) return
  stream.close?.()
  streams.delete(address)
  fill()
}

;(self as unknown as { onconnect: (event: MessageEvent) => void }).onconnect = (event) => {
  const port = event.ports[0]!
  port.onmessage = ({ data }: MessageEvent<Said>) =>
    'join' in data ? join(data.join, data.after, port) : leave(data.leave, port)
}
