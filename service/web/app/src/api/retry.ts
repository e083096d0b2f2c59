import { Refused } from './client'

// Milliseconds between tries of a query that has failed, until the server answers it.
const RETRY_MS = 3000

export const isRefused = (error: Error | null) => error instanceof Refused && error.problem.status < 500

/** When a query that has failed is tried again: in three seconds, unless the server has refused it. */
export const afterFailure = ({ status, error }: { status: string; error: Error | null }) =>
  status === 'error' && !isRefused(error) && RETRY_MS
