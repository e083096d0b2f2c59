import { Alert, Button } from '@mantine/core'
import { useQuery, useQueryClient } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useState } from 'react'
import { BASE, api } from '../../api/client'
import { useChange } from '../../api/change'
import { useSession } from '../../api/session'
import type { QueueEntry } from '../../api/types'
import { localTime } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { KeptRow } from '../../parts/KeptRow'
import { Page } from '../../parts/Page'
import { State } from '../../parts/State'
import { type Move, movesOf } from './moves'

/** The jobs that run and that wait, what each waits for and when it may start; administrators move jobs. */
export function Queue() {
  const { may_read_dashboard } = useSession()
  const queue = useQuery({
    queryKey: ['queue'],
    queryFn: async ({ signal }) => (await api.GET('/v1/queue', { signal })).data!,
    refetchInterval: 5000,
  })
  return (
    <Page title="Queue">
      <Answer of={queue}>
        {({ places, not_ready, running, waiting }) => (
          <>
            {not_ready !== null && (
              <Alert color="orange" variant="outline" title="No job can continue" my="sm">
                {not_ready}
              </Alert>
            )}
            <p>
              {running.length} of {places} places are taken; {waiting.length}{' '}
              {waiting.length === 1 ? 'job waits' : 'jobs wait'}.
              {may_read_dashboard && (
                <>
                  {' '}
                  <a href={`${BASE}/ray/`}>Ray’s dashboard</a> shows the cluster.
                </>
              )}
            </p>
            <h2>Running</h2>
            {running.length > 0 ? <Table label="Running jobs" entries={running} /> : <Nothing>No job runs.</Nothing>}
            <h2>Waiting</h2>
            {waiting.length > 0 ? <Waiting entries={waiting} /> : <Nothing>No job waits.</Nothing>}
          </>
        )}
      </Answer>
    </Page>
  )
}

/** The waiting jobs in the order in which they start, with buttons that move a job among those of its priority. */
function Waiting({ entries }: { entries: QueueEntry[] }) {
  const { movesJobs } = useSession()
  const client = useQueryClient()
  const [said, setSaid] = useState('')
  const move = useChange(async ({ job, before, words }: Move) => {
    const body = before === undefined ? { job } : { job, before }
    client.setQueryData(['queue'], (await api.POST('/v1/queue:move', { body })).data!)
    setSaid(words)
  }, [])
  return (
    <>
      {move.error && <Failure error={move.error} />}
      <p role="status" className="soft">
        {said}
      </p>
      <Table
        label="Waiting jobs"
        entries={entries}
        actions={
          movesJobs
            ? (entry) =>
                movesOf(entries, entry).map((each) => (
                  <Button
                    key={each.verb}
                    data-place={each.verb}
                    size="compact-xs"
                    variant="default"
                    aria-label={`${each.verb}: ${entry.job!.name}`}
                    onClick={() => move.mutate(each)}
                  >
                    {each.verb}
                  </Button>
                ))
            : undefined
        }
      />
    </>
  )
}

function Table(props: { label: string; entries: QueueEntry[]; actions?: (entry: QueueEntry) => React.ReactNode }) {
  const { label, entries, actions } = props
  const isWaiting = entries[0]!.position !== null
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label={label}>
      <table className="data">
        <thead>
          <tr>
            {isWaiting && <th scope="col">position</th>}
            {['job', 'state', 'owner', 'team'].map((head) => (
              <th key={head} scope="col" className="l">
                {head}
              </th>
            ))}
            <th scope="col">priority</th>
            <th scope="col" className="l">
              waits for
            </th>
            {isWaiting && <th scope="col">may start</th>}
            {actions && (
              <th scope="col" className="l">
                move
              </th>
            )}
          </tr>
        </thead>
        <tbody>
          {entries.map((entry, k) => (
            <tr key={entry.job?.id ?? `hidden ${k}`}>
              {isWaiting && <td>{entry.position}</td>}
              <th scope="row" className="l">
                {entry.job ? <JobLink job={entry.job} /> : <span className="soft">a job that you may not read</span>}
              </th>
              <td className="l">{entry.job && <State state={entry.job.state} />}</td>
              <td className="l">{entry.job?.owner}</td>
              <td className="l">{entry.job?.team}</td>
              <td>{entry.job?.priority}</td>
              <td className="l wrap">{entry.waiting_for}</td>
              {isWaiting && (
                <td title={entry.estimated_start ?? undefined}>
                  {entry.estimated_start ? localTime(entry.estimated_start) : 'unknown'}
                </td>
              )}
              {actions && (
                <td className="l">
                  <KeptRow>{entry.job && actions(entry)}</KeptRow>
                </td>
              )}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

const VIEWS = { search: '/studies/$id', finetune: '/finetunes/$id', serving: '/served/$id' } as const

function JobLink({ job }: { job: NonNullable<QueueEntry['job']> }) {
  const to = VIEWS[job.kind as keyof typeof VIEWS]
  if (to === undefined) return <>{job.name}</>
  return (
    <Link to={to} params={{ id: job.id }}>
      {job.name}
    </Link>
  )
}
