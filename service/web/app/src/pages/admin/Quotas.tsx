import { Button, Progress, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import { useSession } from '../../api/session'
import type { Team, TeamUsage } from '../../api/types'
import { bytes, count } from '../../format'
import { Answer } from '../../parts/Answer'
import { Fields } from '../../parts/Fields'

type Limits = Team['limits']

interface Row {
  limit: keyof Limits
  name: string
  /** What is used of the quota; the server does not tell of requests. */
  used?: (usage: TeamUsage) => number
  text: (x: number) => string
}

const ROWS: Row[] = [
  { limit: 'max_running', name: 'running jobs', used: ({ running }) => running, text: count },
  { limit: 'max_replicas', name: 'replicas', used: ({ replicas }) => replicas, text: count },
  { limit: 'gpu_hours', name: 'GPU-hours this month', used: (usage) => usage.gpu_hours, text: count },
  { limit: 'artifact_bytes', name: 'artifacts', used: (usage) => usage.artifact_bytes, text: bytes },
  { limit: 'export_bytes', name: 'exports', used: (usage) => usage.export_bytes, text: bytes },
  { limit: 'requests_per_minute', name: 'requests a minute', text: count },
]

/** The share and the quotas of a team, with what its jobs use; administrators of the server change them. */
export function Quotas({ team }: { team: Team }) {
  const { administers } = useSession()
  const [isEdited, setEdited] = useState(false)
  const usage = useQuery({
    // Not below `teams`: after a team is removed, its usage would be asked for once more.
    queryKey: ['usage', team.name],
    queryFn: async ({ signal }) => {
      const params = { path: { team: team.name } }
      return (await api.GET('/v1/teams/{team}/usage', { params, signal })).data!
    },
    refetchInterval: 10_000,
  })
  return (
    <div>
      <h3>Share and quotas</h3>
      <Answer of={usage}>
        {(found) => (
          <>
            <p>
              Weight {team.limits.weight}; {found.recent_gpu_hours} recent GPU-hours count for the fair share;{' '}
              {found.waiting} {found.waiting === 1 ? 'job waits' : 'jobs wait'}.
            </p>
            <Table team={team} usage={found} />
          </>
        )}
      </Answer>
      {administers &&
        (isEdited ? (
          <Editor team={team} onDone={() => setEdited(false)} />
        ) : (
          <Button size="compact-sm" variant="default" mt="xs" onClick={() => setEdited(true)}>
            Change quotas of {team.name}
          </Button>
        ))}
    </div>
  )
}

function Table({ team, usage }: { team: Team; usage: TeamUsage }) {
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label={`Quotas of ${team.name}`}>
      <table className="data">
        <thead>
          <tr>
            <th scope="col" className="l">
              quota
            </th>
            <th scope="col">used</th>
            <th scope="col">limit</th>
            <th scope="col" className="l">
              share used
            </th>
          </tr>
        </thead>
        <tbody>
          {ROWS.map(({ limit, name, used, text }) => {
            const most = team.limits[limit]
            const now = used?.(usage)
            return (
              <tr key={limit}>
                <th scope="row" className="l">
                  {name}
                </th>
                <td>{now !== undefined && text(now)}</td>
                <td>{most === null ? 'none' : text(most)}</td>
                <td className="l" style={{ minWidth: 90 }}>
                  {most !== null && now !== undefined && (
                    <Progress
                      aria-label={`Used of ${name} of ${team.name}`}
                      value={Math.min(100, (100 * now) / most)}
                      color={now >= most ? 'red' : 'accent'}
                    />
                  )}
                </td>
              </tr>
            )
          })}
        </tbody>
      </table>
    </div>
  )
}

/** A form of the weight and the quotas: an empty quota is no limit. */
function Editor({ team, onDone }: { team: Team; onDone: () => void }) {
  const fields: { limit: keyof Limits; name: string }[] = [{ limit: 'weight', name: 'weight' }, ...ROWS]
  const [typed, setTyped] = useState<Partial<Record<keyof Limits, string>>>({})
  const save = useChange(
    async () => {
      const changed = Object.entries(typed).map(([limit, text]) => [limit, text === '' ? null : Number(text)])
      await api.PATCH('/v1/teams/{team}', {
        params: { path: { team: team.name } },
        body: Object.fromEntries(changed) as Partial<Limits>,
      })
    },
    [['teams'], ['usage']],
    onDone,
  )
  return (
    <Fields
      action="Save"
      isPending={save.isPending}
      error={save.error}
      onSubmit={() => save.mutate(undefined)}
      after={
        <Button variant="default" onClick={onDone}>
          Keep
        </Button>
      }
    >
      {fields.map(({ limit, name }) => (
        <TextInput
          key={limit}
          label={limit.endsWith('bytes') ? `${name}, bytes` : name}
          type="number"
          min={0}
          step="any"
          required={limit === 'weight'}
          withAsterisk={false}
          placeholder="no limit"
          value={typed[limit] ?? team.limits[limit] ?? ''}
          onChange={({ currentTarget }) => setTyped({ ...typed, [limit]: currentTarget.value })}
        />
      ))}
    </Fields>
  )
}
