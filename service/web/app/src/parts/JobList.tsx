import { keepPreviousData, useQuery, useQueryClient } from '@tanstack/react-query'
import type { ReactNode } from 'react'
import { useLiveJobs } from '../api/live'
import { RUNNING_MS, session as sessionQuery } from '../api/queries'
import { afterFailure } from '../api/retry'
import type { Study } from '../api/types'
import { count, duration, shortTime } from '../format'
import { Answer, Nothing } from './Answer'
import { JobFilters, type JobSearch } from './JobFilters'
import { CONNECTIONS } from './JobHead'
import { State } from './State'
import { Status } from './Status'

type Job = Pick<Study, 'id' | 'name' | 'state' | 'owner' | 'waiting_for' | 'wall_clock_s' | 'created_at'>

export interface JobColumn<J> {
  head: string
  isText?: boolean
  width?: number
  title?: (job: J) => string | undefined
  cell: (job: J) => ReactNode
}

interface Jobs<J> {
  jobs: J[]
  total: number
}

// Milliseconds between requests while the connection that tells changes is lost.
const POLL_MS = 5000

/**
 * The jobs of one kind that the user may read, as a table which follows what happens to them; the server searches and
 * sorts. `withProgress` is a job with the progress that the stream of all jobs has told.
 */
export function JobList<J extends Job>(props: {
  kind: string
  /** The first part of the query's key. */
  listKey: string
  noun: { one: string; many: string }
  search: JobSearch
  onSearch: (changed: JobSearch) => void
  load: (signal: AbortSignal) => Promise<Jobs<J>>
  withProgress: (job: J, progress: Record<string, unknown>) => J
  link: (job: J) => ReactNode
  /** The columns between the state and the owner. */
  columns: JobColumn<J>[]
  /** What is beside the filters, such as a link to a new job. */
  beside?: ReactNode
  actions?: (job: J) => ReactNode
  empty: ReactNode
}) {
  const { kind, listKey, noun, search, onSearch, load, withProgress, link, columns, beside, actions, empty } = props
  const client = useQueryClient()
  const session = useQuery(sessionQuery)
  const queryKey = [listKey, search]
  const connection = useLiveJobs(kind, listKey, ({ job, progress }) =>
    client.setQueryData<Jobs<J>>(
      queryKey,
      (old) => old && { ...old, jobs: old.jobs.map((each) => (each.id === job ? withProgress(each, progress) : each)) },
    ),
  )
  const jobs = useQuery({
    queryKey,
    queryFn: ({ signal }) => load(signal),
    // The stream of all jobs tells no times, so those of running jobs are asked for.
    refetchInterval: ({ state }) =>
      afterFailure(state) ||
      (connection !== 'live' ? POLL_MS : state.data?.jobs.some((job) => job.state === 'RUNNING') && RUNNING_MS),
    placeholderData: keepPreviousData,
  })
  const all: JobColumn<J>[] = [
    { head: 'name', isText: true, cell: link },
    {
      head: 'state',
      isText: true,
      cell: ({ state, waiting_for }) => (
        <>
          <State state={state} />
          {waiting_for && <small>{waiting_for}</small>}
        </>
      ),
    },
    ...columns,
    ...(session.data?.has_accounts ? [{ head: 'owner', isText: true, cell: ({ owner }: J) => owner }] : []),
    { head: 'time', cell: ({ wall_clock_s }) => duration(wall_clock_s) },
    { head: 'created', title: (job) => job.created_at, cell: ({ created_at }) => shortTime(created_at) },
    ...(actions ? [{ head: 'actions', cell: actions }] : []),
  ]
  const isSearched = Boolean(search.q || search.state)
  // The region stays when nothing matches: what is in a region that appears is not announced.
  const inWords = (shown: number, total: number) => {
    if (shown === 0 && isSearched) return `No ${noun.one} matches.`
    const all = total === 1 ? `1 ${noun.one}` : `${count(total)} ${noun.many}`
    return total > shown && shown > 0 ? `${all}, of which the first ${shown} are shown; search to find others` : all
  }
  return (
    <>
      <div className="row">
        <JobFilters search={search} onChange={onSearch} />
        {beside && <span style={{ marginLeft: 'auto' }}>{beside}</span>}
      </div>
      <Answer of={jobs}>
        {({ jobs: found, total }) => (
          <>
            {found.length > 0 && <Table label={`Table of ${noun.many}`} jobs={found} columns={all} />}
            {found.length === 0 && !isSearched && empty}
            <Status text={inWords(found.length, total)} cause={JSON.stringify(search)} />
            <p className="soft">
              Changes:{' '}
              <span role="status" aria-label="Connection">
                {CONNECTIONS[connection]}
              </span>
            </p>
          </>
        )}
      </Answer>
    </>
  )
}

function Table<J extends Job>({ label, jobs, columns }: { label: string; jobs: J[]; columns: JobColumn<J>[] }) {
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label={label}>
      <table className="data">
        <thead>
          <tr>
            {columns.map(({ head, isText }) => (
              <th key={head} scope="col" className={isText ? 'l' : ''}>
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {jobs.map((job) => (
            <tr key={job.id}>
              {columns.map(({ head, isText, width, title, cell }, k) => {
                const own = { className: isText ? 'l' : '', style: { minWidth: width }, title: title?.(job) }
                return k === 0 ? (
                  <th key={head} scope="row" {...own} className="l name">
                    {cell(job)}
                  </th>
                ) : (
                  <td key={head} {...own}>
                    {cell(job)}
                  </td>
                )
              })}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

/** The commands that submit a file to this server, in place of an empty list. */
export function SubmitCommand({ noun, file }: { noun: string; file: string }) {
  return (
    <>
      <Nothing>{noun}</Nothing>
      <pre>{`mergesearch submit ${file} --server ${new URL(document.baseURI).href}`}</pre>
    </>
  )
}
