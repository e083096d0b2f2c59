import { Button, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import { useSession } from '../../api/session'
import type { User } from '../../api/types'
import { localTime } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { Fields } from '../../parts/Fields'
import { KeptRow } from '../../parts/KeptRow'
import { Page } from '../../parts/Page'
import { NewToken } from '../account/NewToken'

/** The users of the server, whom administrators add, disable, enable and make administrators. */
export function Users() {
  const { administers } = useSession()
  return (
    <Page title="Users">
      {administers ? <All /> : <Nothing>Only administrators of the server see its users.</Nothing>}
    </Page>
  )
}

function All() {
  const users = useQuery({
    queryKey: ['users'],
    queryFn: async ({ signal }) => (await api.GET('/v1/users', { signal })).data!.users,
  })
  return (
    <>
      <Answer of={users}>{(found) => <Table users={found} />}</Answer>
      <NewUser />
    </>
  )
}

type Change = { is_admin?: boolean; is_disabled?: boolean }

// The generated types lack fields that can only be null.
const UNBOUND = { identity: null } as Change

function Table({ users }: { users: User[] }) {
  const { has_identity_provider } = useSession()
  const [receiver, setReceiver] = useState<string>()
  const change = useChange(
    ({ user, body }: { user: string; body: Change }) =>
      api.PATCH('/v1/users/{user}', { params: { path: { user } }, body }),
    [['users'], ['session']],
  )
  const actions = (user: User): [verb: string, body: Change][] => [
    user.is_disabled ? ['Enable', { is_disabled: false }] : ['Disable', { is_disabled: true }],
    user.is_admin ? ['Demote', { is_admin: false }] : ['Make administrator', { is_admin: true }],
    ...(has_identity_provider ? [['Unbind identity', UNBOUND] as [string, Change]] : []),
  ]
  return (
    <>
      {change.error && <Failure error={change.error} />}
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Table of users">
        <table className="data">
          <thead>
            <tr>
              {['name', 'state', 'administrator', 'teams'].map((head) => (
                <th key={head} scope="col" className="l">
                  {head}
                </th>
              ))}
              <th scope="col">added</th>
              <th scope="col" className="l">
                actions
              </th>
            </tr>
          </thead>
          <tbody>
            {users.map((user) => (
              <tr key={user.name}>
                <th scope="row" className="l">
                  {user.name}
                </th>
                <td className="l">{user.is_disabled ? 'disabled' : 'enabled'}</td>
                <td className="l">{user.is_admin ? 'yes' : 'no'}</td>
                <td className="l">
                  {Object.entries(user.teams)
                    .map(([team, role]) => `${team} (${role})`)
                    .join(', ')}
                </td>
                <td title={user.created_at}>{localTime(user.created_at)}</td>
                <td className="l">
                  <KeptRow>
                    {actions(user).map(([verb, body]) => (
                      <Button
                        key={verb}
                        data-place={Object.keys(body)[0]}
                        size="compact-xs"
                        variant="default"
                        aria-label={`${verb}: ${user.name}`}
                        onClick={() => change.mutate({ user: user.name, body })}
                      >
                        {verb}
                      </Button>
                    ))}
                    <Button
                      size="compact-xs"
                      variant="default"
                      data-place="token"
                      aria-label={`New token: ${user.name}`}
                      onClick={() => setReceiver(user.name)}
                    >
                      New token
                    </Button>
                  </KeptRow>
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {receiver && (
        <section aria-label={`New token of ${receiver}`}>
          <h2>Token of {receiver}</h2>
          <NewToken key={receiver} user={receiver} />
        </section>
      )}
    </>
  )
}

function NewUser() {
  const [name, setName] = useState('')
  const add = useChange(async () => {
    await api.POST('/v1/users', { body: { name, is_admin: false } })
    setName('')
  }, [['users']])
  return (
    <>
      <h2>Add a user</h2>
      <Fields action="Add user" isPending={add.isPending} error={add.error} onSubmit={() => add.mutate(undefined)}>
        <TextInput
          label="Name"
          required
          withAsterisk={false}
          value={name}
          onChange={(event) => setName(event.currentTarget.value)}
        />
      </Fields>
      <p className="soft">
        A user logs in with a token, which an administrator creates, or with the identity provider under the same name.
        A user who leaves is disabled: names are never given to others.
      </p>
    </>
  )
}
