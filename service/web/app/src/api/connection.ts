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

/** The server has answered a request, also if it has refused it. */
export const answered = () => set({ isLost: false, answeredAt: Date.now() })

/** The server could not be reached. */
export const lost = () => set({ ...connection, isLost: true })

const subscribe = (listener: () => void) => {
  listeners.add(listener)
  return () => listeners.delete(listener)
}

/** Whether the last request reached the server, and when one did. */
export const useConnection = () => useSyncExternalStore(subscribe, () => connection)
