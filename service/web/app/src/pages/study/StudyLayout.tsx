import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Link, Outlet, useLocation, useSearch } from '@tanstack/react-router'
import { Suspense, createContext, lazy, useContext, useEffect } from 'react'
import { servedStudies, study as studyQuery } from '../../api/queries'
import { type Connection, useLive } from '../../api/live'
import type { Progress, Study } from '../../api/types'
import { count } from '../../format'
import { Answer } from '../../parts/Answer'
import { JobHead, JobNotes } from '../../parts/JobHead'
import { Page } from '../../parts/Page'
import { studyRoute } from '../../router'

// Loaded after the study, as in the list: dialogs are opened later.
const StudyMenu = lazy(async () => ({ default: (await import('./actions/StudyMenu')).StudyMenu }))

/** The study of the page, its latest progress, and the state of the connection that brings it. */
interface Followed {
  study: Study
  progress: Progress | null
  connection: Connection
}

const Context = createContext<Followed | null>(null)

export function useStudy(): Followed {
  return useContext(Context)!
}

const VIEWS = [
  { to: '/studies/$id', name: 'Overview', hasRanges: true },
  { to: '/studies/$id/trials', name: 'Trials' },
  { to: '/studies/$id/parameters', name: 'Parameters', hasRanges: true },
  { to: '/studies/$id/rungs', name: 'Rungs' },
  { to: '/studies/$id/timeline', name: 'Timeline' },
  { to: '/studies/$id/compare', name: 'Compare' },
  { to: '/studies/$id/benchmarks', name: 'Benchmarks' },
  { to: '/studies/$id/exports', name: 'Exports' },
  { to: '/studies/$id/events', name: 'Events' },
  { to: '/studies/$id/log', name: 'Log' },
  { to: '/studies/$id/file', name: 'File' },
] as const

/** What all views of a study have: its name and state, and the links between the views. */
export function StudyLayout() {
  const { id } = studyRoute.useParams()
  const query = useQuery(studyQuery(id))
  const { progress, connection, changes, show } = useLive(
    `/v1/studies/${id}`,
    ['study', id],
    query.data?.last_event_id,
    'trials',
  )
  const pathname = useLocation({ select: (location) => location.pathname })
  useEffect(() => {
    if (changes) show() // another view begins with what is true now
    // oxlint-disable-next-line react-hooks/exhaustive-deps
  }, [pathname])
  return (
    <Answer of={query} title="Study">
      {(study) => (
        <Context value={{ study, progress: progress ?? study.progress, connection }}>
          <Page
            title={study.name}
            before={
              <JobHead job={study} connection={connection}>
                <Suspense>
                  <StudyMenu study={study} />
                </Suspense>
              </JobHead>
            }
          >
            <JobNotes job={study} />
            <nav className="views" aria-label="Views of the study">
              <Views study={id} />
              <ChatLink study={id} />
            </nav>
            <div role="status" aria-label="Changes">
              {changes && (
                <Button size="compact-xs" variant="light" mb="sm" onClick={show}>
                  {changes.newTrials === 0
                    ? 'Trials have changed'
                    : `${count(changes.newTrials)} new ${changes.newTrials === 1 ? 'trial' : 'trials'}`}
                  : show
                </Button>
              )}
            </div>
            {/* The views of another study begin anew, without what was chosen in this one. */}
            <Outlet key={study.id} />
          </Page>
        </Context>
      )}
    </Answer>
  )
}

/** Links to the views of a study; the ranges of parameters go along to those that have them. */
function Views({ study }: { study: string }) {
  const ranges = useSearch({ strict: false, select: (search) => search.ranges })
  return VIEWS.map((view) => (
    <Link
      key={view.to}
      to={view.to}
      params={{ id: study }}
      search={'hasRanges' in view ? { ranges } : {}}
      activeOptions={{ exact: true, includeSearch: false }}
    >
      {view.name}
    </Link>
  ))
}

/** The link to the chat, where the study is served. */
function ChatLink({ study }: { study: string }) {
  const served = useQuery(servedStudies(study))
  const first = served.data?.[0]
  if (first === undefined) return null
  return (
    <Link to="/served/$id" params={{ id: first.id }}>
      Chat
    </Link>
  )
}
