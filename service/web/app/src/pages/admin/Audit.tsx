import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { api } from '../../api/client'
import { useSession } from '../../api/session'
import type { AuditEntry } from '../../api/types'
import { localTime } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Filter } from '../../parts/Filter'
import { Page } from '../../parts/Page'
import { auditRoute } from '../../router'
import { changesOf } from './changes'

const LIMIT = 50

/** The audit log, newest entries first: who changed what, when and from where, and what was different before. */
export function Audit() {
  const { administers } = useSession()
  return (
    <Page title="Audit log">
      {administers ? <Log /> : <Nothing>Only administrators of the server read its audit log.</Nothing>}
    </Page>
  )
}

function Log() {
  const search = auditRoute.useSearch()
  const navigate = auditRoute.useNavigate()
  const { user, target, before } = search
  const type = (typed: { user?: string } | { target?: string }) =>
    navigate({ search: { user, target, ...typed }, replace: true })
  const log = useQuery({
    queryKey: ['audit', user, target, before],
    queryFn: async ({ signal }) => {
      const page = before === undefined ? {} : { before: Number(before) }
      const query = { user, target, sort: '-id' as const, limit: LIMIT, ...page }
      return (await api.GET('/v1/audit', { params: { query }, signal })).data!.entries
    },
    placeholderData: keepPreviousData,
  })
  return (
    <>
      <div className="row" role="search">
        <Filter label="User" value={user} onType={(text) => type({ user: text })} />
        <Filter
          label="Target"
          placeholder="job 5f0c…, team red"
          value={target}
          onType={(text) => type({ target: text })}
        />
        {(user ?? target) && (
          <Link to="/admin/audit" search={{}}>
            All entries
          </Link>
        )}
      </div>
      <Answer of={log}>
        {(entries) =>
          entries.length === 0 ? (
            <Nothing>{before ? 'There are no older entries.' : 'No entry matches.'}</Nothing>
          ) : (
            <>
              <Table entries={entries} />
              <nav className="row" aria-label="Pages of the audit log">
                {before && (
                  <Link to="/admin/audit" search={{ user, target }}>
                    Newest entries
                  </Link>
                )}
                {entries.length === LIMIT && (
                  <Link to="/admin/audit" search={{ user, target, before: `${entries.at(-1)!.id}` }}>
                    Older entries
                  </Link>
                )}
              </nav>
            </>
          )
        }
      </Answer>
    </>
  )
}

function Table({ entries }: { entries: AuditEntry[] }) {
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Entries of the audit log">
      <table className="data">
        <thead>
          <tr>
            {['time', 'user', 'from', 'action', 'target', 'change'].map((head) => (
              <th key={head} scope="col" className="l">
                {head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {entries.map((entry) => (
            <tr key={entry.id}>
              <th scope="row" className="l" title={entry.time}>
                {localTime(entry.time)}
              </th>
              <td className="l">
                {entry.user ?? <span className="soft">none</span>}
                {entry.token !== null && <small>{entry.token}</small>}
              </td>
              <td className="l">{entry.origin}</td>
              <td className="l">{entry.action}</td>
              <td className="l">
                <Link to="/admin/audit" search={{ target: entry.target }}>
                  {entry.target}
                </Link>
              </td>
              <td className="l wrap">
                <Changes entry={entry} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}

/** What an entry changed: each field with its value before, struck out, and after. */
function Changes({ entry }: { entry: AuditEntry }) {
  const changes = changesOf(entry.before, entry.after)
  if (changes.length === 0) return null
  return (
    <ul className="changes">
      {changes.map(({ field, before, after }) => (
        <li key={field}>
          {field}: {before !== undefined && <del>{before}</del>} {after !== undefined && <ins>{after}</ins>}
        </li>
      ))}
    </ul>
  )
}
