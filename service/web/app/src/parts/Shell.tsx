import { ActionIcon, useComputedColorScheme, useMantineColorScheme } from '@mantine/core'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { Link, Navigate, useLocation, useMatches } from '@tanstack/react-router'
import { type ReactNode, useEffect, useRef, useState } from 'react'
import { BASE, api } from '../api/client'
import { useConnection } from '../api/connection'
import { session as sessionQuery } from '../api/queries'
import { logOut, rightsOf } from '../api/session'
import type { Session } from '../api/types'
import { duration } from '../format'
import { Answer } from './Answer'

/**
 * What surrounds every page: the link past the navigation, the navigation, the user, whether the server answers, and
 * the content. Without a session, a server with accounts shows the login only.
 */
export function Shell({ children }: { children: ReactNode }) {
  const session = useQuery(sessionQuery)
  const location = useLocation()
  const isOut = session.data !== undefined && session.data.has_accounts && session.data.user === null
  return (
    <>
      <a className="skip" href={`${BASE}${location.pathname}${location.searchStr}#main`}>
        Skip to the content
      </a>
      <header className="bar">
        <strong>mergesearch</strong>
        {session.data && !isOut && <Navigation session={session.data} />}
        <div className="row" style={{ marginLeft: 'auto' }}>
          {session.data && !isOut && <UserMenu session={session.data} />}
          <Colours />
        </div>
      </header>
      <ServerState />
      <main id="main" tabIndex={-1}>
        {session.data ? (
          isOut ? (
            <LoginFirst>{children}</LoginFirst>
          ) : (
            children
          )
        ) : (
          <Answer of={session}>{() => null}</Answer>
        )}
      </main>
    </>
  )
}

/** The login in place of all other views, which it leads back to. */
function LoginFirst({ children }: { children: ReactNode }) {
  const location = useLocation()
  // While the login is loaded, the location is its own already, and the view still the one before.
  const isLogin = useMatches({ select: (matches) => matches.at(-1)?.fullPath === '/login' })
  if (isLogin) return children
  return location.pathname === '/login' ? null : <Navigate to="/login" search={{ next: location.href }} replace />
}

function Navigation({ session }: { session: Session }) {
  const { user, administers } = rightsOf(session)
  return (
    <nav aria-label="Main">
      <Link to="/studies">Studies</Link>
      <Link to="/finetunes">Fine-tunings</Link>
      <Link to="/queue">Queue</Link>
      {user && (administers || Object.keys(user.teams).length > 0) && <Link to="/teams">Teams</Link>}
      {administers && <Link to="/admin/users">Users</Link>}
      {administers && <Link to="/admin/audit">Audit log</Link>}
      {(user === null || administers) && <Link to="/admin/cluster">Cluster</Link>}
    </nav>
  )
}

/** The user with the user's teams, the settings and the logout; without accounts, only the settings. */
function UserMenu({ session: { user, expires_at } }: { session: Session }) {
  const menu = useRef<HTMLDetailsElement>(null)
  const { href } = useLocation()
  useEffect(() => menu.current?.removeAttribute('open'), [href])
  if (user === null) return <Link to="/settings">Settings</Link>
  const teams = Object.entries(user.teams)
  return (
    <details
      ref={menu}
      className="menu"
      onKeyDown={(event) => {
        if (event.key !== 'Escape' || !menu.current?.open) return
        menu.current.open = false
        menu.current.querySelector('summary')?.focus()
      }}
      onBlur={(event) => {
        if (!event.currentTarget.contains(event.relatedTarget)) event.currentTarget.open = false
      }}
    >
      <summary>{user.name}</summary>
      <div>
        {user.is_admin && <p className="soft">administrator of the server</p>}
        {teams.length > 0 ? (
          <ul aria-label="Your teams">
            {teams.map(([team, role]) => (
              <li key={team}>
                {team} <span className="soft">{role}</span>
              </li>
            ))}
          </ul>
        ) : (
          <p className="soft">a member of no team</p>
        )}
        <Link to="/settings">Settings</Link>
        {expires_at !== null && (
          <button type="button" className="link" onClick={logOut}>
            Log out
          </button>
        )}
      </div>
    </details>
  )
}

function Colours() {
  const scheme = useComputedColorScheme('light')
  const { setColorScheme } = useMantineColorScheme()
  const other = scheme === 'dark' ? 'light' : 'dark'
  return (
    <ActionIcon variant="subtle" color="gray" aria-label={`Use ${other} colours`} onClick={() => setColorScheme(other)}>
      {scheme === 'dark' ? '☀' : '☾'}
    </ActionIcon>
  )
}

// Milliseconds between questions whether the server is back.
const ASK_MS = 2000

/** Says that the server does not answer, and asks until it does; what has failed is requested again then. */
function ServerState() {
  const { isLost, answeredAt } = useConnection()
  const client = useQueryClient()
  useQuery({
    queryKey: ['alive'],
    queryFn: async ({ signal }) => (await api.GET('/healthz', { signal })).data!,
    enabled: isLost,
    refetchInterval: ASK_MS,
    retry: false,
    staleTime: 0,
  })
  useEffect(() => {
    if (!isLost) client.refetchQueries({ type: 'active', predicate: ({ state }) => state.error !== null })
  }, [client, isLost])
  return (
    <div role="status" aria-label="Server">
      {isLost && (
        <p className="lost">
          The server does not answer. The page retries automatically. <Since time={answeredAt} />
        </p>
      )}
    </div>
  )
}

/** How long ago the server has answered; it is not announced every second. */
function Since({ time }: { time: number }) {
  const [now, setNow] = useState(Date.now)
  useEffect(() => {
    const timer = window.setInterval(() => setNow(Date.now()), 1000)
    return () => window.clearInterval(timer)
  }, [])
  return (
    <span role="timer" aria-live="off">
      Last answer {duration((now - time) / 1000)} ago.
    </span>
  )
}
