import { useMemo } from 'react'
import { api } from '../../api/client'
import { KINDS } from '../../api/kinds'
import type { StudyEvent } from '../../api/types'
import { localTime } from '../../format'
import { Choose } from '../../parts/Choose'
import { type Column, VirtualTable } from '../../parts/VirtualTable'
import { eventsRoute } from '../../router'
import { sentenceOf } from './eventSentence'
import { useStudy } from './StudyLayout'

// Frames of event streams that are no events, and events of other jobs than studies.
const STREAMED = new Set(['progress', 'end', 'training', 'study', 'analysis', 'endpoint', 'answered'])
const OPTIONS = KINDS.filter((kind) => !STREAMED.has(kind)).map((kind) => ({
  value: kind,
  label: kind.replaceAll('_', ' '),
}))
const HEADERS = { Accept: 'application/json' } // otherwise the answer is a stream

/** What has happened in a study, as sentences: the newest first, of all kinds or of one. */
export function Events() {
  const { study } = useStudy()
  const search = eventsRoute.useSearch()
  const navigate = eventsRoute.useNavigate()
  const { kind, sort = '-time' } = search
  const change = (changed: Partial<typeof search>) => navigate({ search: { ...search, ...changed }, replace: true })
  const columns = useMemo<Column<StudyEvent>[]>(
    () => [
      {
        sort: 'time',
        head: 'time',
        isText: true,
        cell: ({ time }) => (
          <time dateTime={time} title={time}>
            {localTime(time)}
          </time>
        ),
      },
      { head: 'kind', isText: true, cell: (event) => event.kind.replaceAll('_', ' ') },
      { head: 'what happened', isText: true, cell: (event) => sentenceOf(event, study.id) },
    ],
    [study.id],
  )
  return (
    <>
      <h2>Events</h2>
      <div className="row" role="search">
        <Choose
          label="Kind"
          any="every kind"
          options={OPTIONS}
          value={kind}
          onChange={(chosen) => change({ kind: chosen })}
        />
      </div>
      <VirtualTable<StudyEvent>
        label="Events"
        noun="event"
        columns={columns}
        queryKey={['study', study.id, 'events', kind]}
        sort={sort}
        onSort={(chosen) => change({ sort: chosen })}
        load={async (offset, limit, signal) => {
          const order = sort === 'time' ? ('oldest' as const) : ('newest' as const)
          const query = { kind: kind ? [kind] : undefined, order, offset, limit }
          const params = { path: { study_id: study.id }, query }
          const found = (await api.GET('/v1/studies/{study_id}/events', { params, headers: HEADERS, signal })).data!
          const { events, total } = found as { events: StudyEvent[]; total: number }
          return { rows: events, total }
        }}
      />
    </>
  )
}
