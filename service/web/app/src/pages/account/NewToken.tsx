import { NativeSelect, TextInput } from '@mantine/core'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import type { Token } from '../../api/types'
import { CopyField } from '../../parts/CopyField'
import { Fields, Once } from '../../parts/Fields'

const SCOPES = [
  { value: 'read', label: 'read: changes nothing' },
  { value: 'submit', label: 'submit: changes jobs too' },
  { value: 'admin', label: 'admin: manages tokens, teams and users too' },
]
const EXPIRY = [
  { value: '7', label: 'after 7 days' },
  { value: '30', label: 'after 30 days' },
  { value: '90', label: 'after 90 days' },
  { value: '365', label: 'after 365 days' },
  { value: '', label: 'never' },
]

/** Creates a token of a user, and shows it once. */
export function NewToken({ user }: { user: string }) {
  const [name, setName] = useState('')
  const [scope, setScope] = useState<Token['scope']>('submit')
  const [days, setDays] = useState('90')
  const create = useChange(async () => {
    const body = { user, name, scope, expires_in_days: days === '' ? null : Number(days) }
    return (await api.POST('/v1/tokens', { body })).data!
  }, [['tokens']])
  if (create.data)
    return (
      <Once onDone={() => create.reset()}>
        <CopyField label={`Token ${create.data.name} of ${user}, which is shown once`} text={create.data.token} />
      </Once>
    )
  return (
    <Fields
      action="Create token"
      isPending={create.isPending}
      error={create.error}
      onSubmit={() => create.mutate(undefined)}
    >
      <TextInput
        label="Name of the new token"
        placeholder="laptop"
        required
        withAsterisk={false}
        value={name}
        onChange={(event) => setName(event.currentTarget.value)}
      />
      <NativeSelect
        label="Scope"
        data={SCOPES}
        value={scope}
        onChange={(event) => setScope(event.currentTarget.value as Token['scope'])}
      />
      <NativeSelect
        label="It expires"
        data={EXPIRY}
        value={days}
        onChange={(event) => setDays(event.currentTarget.value)}
      />
    </Fields>
  )
}
