/** Who uses the page, and what the server lets them do: what they may not do is absent from the page. */
import { useQuery } from '@tanstack/react-query'
import { BASE, Refused, api } from './client'
import { session } from './queries'
import type { Session, User } from './types'

export interface Rights {
  /** The user; null at a server without accounts, where everybody may do everything but manage accounts. */
  user: User | null
  /** Whether jobs, webhooks and addresses may be added and changed. */
  submits: boolean
  /** Whether own tokens, and members of teams that the user administers, may be changed. */
  manages: boolean
  /** Whether the user administers the server: users, teams and the audit log. */
  administers: boolean
  /** Whether jobs may be moved in the queue. */
  movesJobs: boolean
}

export function rightsOf({ has_accounts, user, scope }: Session): Rights {
  const submits = !has_accounts || scope === 'submit' || scope === 'admin'
  const manages = user !== null && scope === 'admin'
  return {
    user,
    submits,
    manages,
    administers: manages && user.is_admin,
    movesJobs: submits && (!has_accounts || user?.is_admin === true),
  }
}

/** The session of the page and its rights; only in views, which the shell shows once both are known. */
export function useSession(): Session & Rights {
  const { data } = useQuery(session)
  return { ...data!, ...rightsOf(data!) }
}

/**
 * Ends the session, if it has not ended before. The page is loaded anew, so that nothing of the user stays in it; if the
 * server refuses, as after another login in another tab, it shows the present session.
 */
export async function logOut(): Promise<void> {
  try {
    await api.POST('/v1/logout')
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    if (error.problem.status !== 401) return location.reload()
  }
  sessionStorage.clear() // texts that were not submitted
  location.assign(`${BASE}/login`)
}
