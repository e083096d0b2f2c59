/** Whether the server answers: what the shell of the page says while requests fail. */
import { useSyncExternalStore } from 'react'

interface Connection {
  isLost: boolean
  /** When the server last answered, in milliseconds since the epoch. */
  answeredAt: number
}

let connection: Connection = { isLost: false, answeredAt: Date.now() }
const listeners = new Set<() => void>()

function set(changed: Connection) {
  const isNew = changed.isLost !== connection.isLost
  connection = changed
  if (isNew) for (const listener of listeners) listener()
}

// Milliseconds by which the server's clock is ahead of the browser's.
let ahead = 0

/** The server has answered a request, also if it has refused it; `date` is the server's time, as its header says. */
export function answered(date: string | null): void {
  const time = date === null ? NaN : Date.parse(date)
  if (!Number.isNaN(time)) ahead = time - Date.now()
  set({ isLost: false, answeredAt: Date.now() })
}

/** The time of the server's clock, in milliseconds since the epoch. */
export const serverNow = () => Date.now() + ahead

/** The server could not be reached. */
export const lost = () => set({ ...connection, isLost: true })

const subscribe = (listener: () => void) => {
  listeners.add(listener)
  return () => listeners.delete(listener)
}

/** Whether the last request reached the server, and when one did. */
export const useConnection = () => useSyncExternalStore(subscribe, () => connection)
