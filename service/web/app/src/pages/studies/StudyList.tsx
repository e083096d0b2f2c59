import { Progress } from '@mantine/core'
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { Suspense, lazy } from 'react'
import { api } from '../../api/client'
import { session as sessionQuery } from '../../api/queries'
import { maySubmit } from '../../api/rights'
import type { Study } from '../../api/types'
import { count, duration, localTime, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { JobCount, JobFilters, jobQuery } from '../../parts/JobFilters'
import { Page } from '../../parts/Page'
import { State } from '../../parts/State'
import { studiesRoute } from '../../router'

// Loaded after the list: menus and dialogs would be in the first script otherwise.
const StudyMenu = lazy(async () => ({ default: (await import('../study/actions/StudyMenu')).StudyMenu }))
const UNFINISHED = new Set(['RUNNING', 'WAITING'])

/** All studies that the user may read. */
export function StudyList() {
  const search = studiesRoute.useSearch()
  const navigate = studiesRoute.useNavigate()
  const change = (changed: Partial<typeof search>) => navigate({ search: { ...search, ...changed }, replace: true })
  const isSubmitter = maySubmit(useQuery(sessionQuery).data)
  const studies = useQuery({
    queryKey: ['studies', search],
    queryFn: async ({ signal }) =>
      (await api.GET('/v1/studies', { params: { query: jobQuery(search) }, signal })).data!,
    refetchInterval: 5000,
    placeholderData: keepPreviousData,
  })
  return (
    <Page title="Studies">
      <div className="row">
        <JobFilters search={search} onChange={change} />
        {isSubmitter && (
          <Link to="/studies/new" style={{ marginLeft: 'auto' }}>
            New study
          </Link>
        )}
      </div>
      <Answer of={studies}>
        {({ studies: found, total }) =>
          found.length > 0 ? (
            <Table studies={found} total={total} />
          ) : search.q || search.state ? (
            <Nothing>No study matches.</Nothing>
          ) : (
            <Empty />
          )
        }
      </Answer>
    </Page>
  )
}

function Table({ studies, total }: { studies: Study[]; total: number }) {
  const hasMenu = maySubmit(useQuery(sessionQuery).data)
  return (
    <>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Table of studies">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                name
              </th>
              <th scope="col" className="l">
                state
              </th>
              <th scope="col" className="l">
                searcher
              </th>
              <th scope="col">best so far</th>
              <th scope="col">trials</th>
              <th scope="col" className="l">
                progress
              </th>
              <th scope="col" className="l">
                owner
              </th>
              <th scope="col">time</th>
              <th scope="col">created</th>
              {hasMenu && <th scope="col">actions</th>}
            </tr>
          </thead>
          <tbody>
            {studies.map((study) => (
              <Row key={study.id} study={study} hasMenu={hasMenu} />
            ))}
          </tbody>
        </table>
      </div>
      <JobCount total={total} shown={studies.length} one="study" many="studies" />
    </>
  )
}

function Row({ study, hasMenu }: { study: Study; hasMenu: boolean }) {
  const { progress } = study
  const done = Object.entries(study.trials).reduce((sum, [state, n]) => sum + (UNFINISHED.has(state) ? 0 : n), 0)
  const best = Object.entries(progress?.best ?? {})
  return (
    <tr>
      <td className="l">
        <Link to="/studies/$id" params={{ id: study.id }}>
          {study.name}
        </Link>
      </td>
      <td className="l">
        <State state={study.state} />
        {study.waiting_for && <small>{study.waiting_for}</small>}
      </td>
      <td className="l">{study.algorithm}</td>
      <td title={best.map(([name, x]) => `${name} ${value(x)}`).join(', ')}>
        {best.map(([, x]) => value(x)).join('  ')}
      </td>
      <td>{count(done)}</td>
      <td className="l" style={{ minWidth: 120 }}>
        {progress && progress.samples_planned > 0 && (
          <Progress
            aria-label={`Progress of ${study.name}`}
            value={Math.min(100, (100 * progress.samples_scored) / progress.samples_planned)}
          />
        )}
      </td>
      <td className="l">{study.owner}</td>
      <td>{duration(study.wall_clock_s)}</td>
      <td title={study.created_at}>{localTime(study.created_at)}</td>
      {hasMenu && (
        <td>
          <Suspense>
            <StudyMenu study={study} isSmall />
          </Suspense>
        </td>
      )}
    </tr>
  )
}

function Empty() {
  return (
    <>
      <Nothing>There are no studies yet. This command submits a study file:</Nothing>
      <pre>{`mergesearch submit study.yaml --server ${new URL(document.baseURI).href}`}</pre>
    </>
  )
}
