import { Button, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import { useSession } from '../../api/session'
import { localTime } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Fields } from '../../parts/Fields'
import { Notices } from './Notices'
import { type Notice, USUAL } from './notices'

/** The e-mail address of a user, and which changes of the user's jobs are sent to it. */
export function Mail({ user }: { user: string }) {
  const { submits } = useSession()
  const params = { path: { user } }
  const mail = useQuery({
    queryKey: ['mail', user],
    queryFn: async ({ signal }) => (await api.GET('/v1/users/{user}/mail', { params, signal })).data!,
  })
  const [typed, setTyped] = useState<string>()
  const [chosen, setChosen] = useState<Notice[]>()
  const set = useChange(
    (body: { address: string; events: Notice[] }) => api.PUT('/v1/users/{user}/mail', { params, body }),
    [['mail', user]],
  )
  const remove = useChange(() => api.DELETE('/v1/users/{user}/mail', { params }), [['mail', user]])
  return (
    <Answer of={mail}>
      {(found) => {
        const address = typed ?? found.address ?? ''
        const events = chosen ?? (found.address === null ? [...USUAL] : found.events)
        if (!submits) return found.address ? <p>{found.address}</p> : <Nothing>There is no address.</Nothing>
        return (
          <>
            {found.disabled_at && (
              <p>
                No e-mail has been sent since {localTime(found.disabled_at)}: {found.disabled_reason}. Setting the
                address enables it again.
              </p>
            )}
            <Fields
              action="Set address"
              isPending={set.isPending}
              error={set.error ?? remove.error}
              onSubmit={() => set.mutate({ address, events })}
              after={
                <>
                  {found.address !== null && (
                    <Button
                      variant="default"
                      loading={remove.isPending}
                      onClick={() => {
                        setTyped(undefined)
                        remove.mutate(undefined)
                      }}
                    >
                      Remove address
                    </Button>
                  )}
                  <span role="status" className="soft">
                    {set.isSuccess && found.address === address && 'Mails are sent to this address.'}
                  </span>
                </>
              }
            >
              <TextInput
                label="Address"
                type="email"
                autoComplete="email"
                required
                withAsterisk={false}
                value={address}
                onChange={(event) => setTyped(event.currentTarget.value)}
              />
              <Notices value={events} onChange={setChosen} />
            </Fields>
          </>
        )
      }}
    </Answer>
  )
}
