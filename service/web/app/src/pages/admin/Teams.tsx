import { Button, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import { useSession } from '../../api/session'
import type { Role, Team } from '../../api/types'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { Confirm } from '../../parts/Confirm'
import { Fields } from '../../parts/Fields'
import { Page } from '../../parts/Page'
import { Quotas } from './Quotas'

const ROLES: readonly Role[] = ['viewer', 'member', 'admin']

/** The teams of the user, or all for administrators: members with their roles, share, quotas and their use. */
export function Teams() {
  const { user, administers } = useSession()
  const teams = useQuery({
    queryKey: ['teams'],
    queryFn: async ({ signal }) => (await api.GET('/v1/teams', { signal })).data!.teams,
    enabled: user !== null,
  })
  return (
    <Page title="Teams">
      {user === null ? (
        <Nothing>This server has no accounts, and so no teams.</Nothing>
      ) : (
        <Answer of={teams}>
          {(found) =>
            found.length > 0 ? (
              found.map((team) => <OneTeam key={team.name} team={team} />)
            ) : (
              <Nothing>{administers ? 'There are no teams.' : 'You are a member of no team.'}</Nothing>
            )
          }
        </Answer>
      )}
      {administers && <NewTeam />}
    </Page>
  )
}

function OneTeam({ team }: { team: Team }) {
  const { administers } = useSession()
  const [isAsked, setAsked] = useState(false)
  const remove = useChange(() => api.DELETE('/v1/teams/{team}', { params: { path: { team: team.name } } }), [['teams']])
  return (
    <section aria-label={`Team ${team.name}`}>
      <h2>{team.name}</h2>
      <div className="halves">
        <Members team={team} />
        <Quotas team={team} />
      </div>
      {administers && (
        <Button size="compact-sm" variant="default" mt="xs" onClick={() => setAsked(true)}>
          Remove team {team.name}
        </Button>
      )}
      {isAsked && (
        <Confirm
          title={`Remove team ${team.name}`}
          verb="Remove"
          name={team.name}
          isPending={remove.isPending}
          error={remove.error}
          onConfirm={() => remove.mutate(undefined)}
          onClose={() => setAsked(false)}
        >
          <p>Its members stay users of the server. A team that has jobs is not removed.</p>
        </Confirm>
      )}
    </section>
  )
}

/** The members of a team; administrators of the team and of the server change them. */
function Members({ team }: { team: Team }) {
  const { user, manages, administers } = useSession()
  const canChange = administers || (manages && team.members[user!.name] === 'admin')
  const at = (member: string) => ({ params: { path: { team: team.name, user: member } } })
  const set = useChange(
    ({ member, role }: { member: string; role: Role }) =>
      api.PUT('/v1/teams/{team}/members/{user}', { ...at(member), body: { role } }),
    [['teams'], ['session']],
  )
  const remove = useChange(
    (member: string) => api.DELETE('/v1/teams/{team}/members/{user}', at(member)),
    [['teams'], ['session']],
  )
  const error = set.error ?? remove.error
  const members = Object.entries(team.members)
  return (
    <div>
      <h3>Members</h3>
      {members.length === 0 && <Nothing>The team has no members.</Nothing>}
      {members.length > 0 && (
        // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
        <div className="wide" tabIndex={0} role="region" aria-label={`Members of ${team.name}`}>
          <table className="data">
            <thead>
              <tr>
                <th scope="col" className="l">
                  user
                </th>
                <th scope="col" className="l">
                  role
                </th>
                {canChange && <th scope="col">actions</th>}
              </tr>
            </thead>
            <tbody>
              {members.map(([member, role]) => (
                <tr key={member}>
                  <th scope="row" className="l">
                    {member}
                  </th>
                  <td className="l">
                    {canChange ? (
                      <Choose
                        label={`Role of ${member} in ${team.name}`}
                        options={ROLES}
                        value={role}
                        onChange={(chosen) => set.mutate({ member, role: chosen as Role })}
                      />
                    ) : (
                      role
                    )}
                  </td>
                  {canChange && (
                    <td>
                      <Button
                        size="compact-xs"
                        variant="default"
                        aria-label={`Remove ${member} from ${team.name}`}
                        onClick={() => remove.mutate(member)}
                      >
                        Remove
                      </Button>
                    </td>
                  )}
                </tr>
              ))}
            </tbody>
          </table>
        </div>
      )}
      {canChange && (
        <NewMember team={team.name} onAdd={(member, role, onSuccess) => set.mutate({ member, role }, { onSuccess })} />
      )}
      {error && <Failure error={error} />}
    </div>
  )
}

function NewMember(props: { team: string; onAdd: (member: string, role: Role, onSuccess: () => void) => void }) {
  const { team, onAdd } = props
  const [member, setMember] = useState('')
  const [role, setRole] = useState<Role>('member')
  return (
    <Fields
      action="Add member"
      isQuiet
      // A name that the server refuses stays, to be corrected; so does one that is being written meanwhile.
      onSubmit={() => onAdd(member, role, () => setMember((now) => (now === member ? '' : now)))}
    >
      <TextInput
        label={`New member of ${team}`}
        placeholder="name of a user"
        required
        withAsterisk={false}
        value={member}
        onChange={(event) => setMember(event.currentTarget.value)}
      />
      <Choose
        label={`Role of the new member of ${team}`}
        options={ROLES}
        value={role}
        onChange={(chosen) => setRole(chosen as Role)}
      />
    </Fields>
  )
}

function NewTeam() {
  const [name, setName] = useState('')
  const add = useChange(async () => {
    await api.POST('/v1/teams', { body: { name } })
    setName('')
  }, [['teams']])
  return (
    <>
      <h2>Add a team</h2>
      <Fields action="Add team" isPending={add.isPending} error={add.error} onSubmit={() => add.mutate(undefined)}>
        <TextInput
          label="Name"
          required
          withAsterisk={false}
          value={name}
          onChange={(event) => setName(event.currentTarget.value)}
        />
      </Fields>
    </>
  )
}
