import { Button, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import { afterFailure } from '../../api/retry'
import { useSession } from '../../api/session'
import type { Webhook } from '../../api/types'
import { localTime } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { CopyField } from '../../parts/CopyField'
import { Confirm } from '../../parts/Confirm'
import { Fields, Once } from '../../parts/Fields'
import { Notices } from './Notices'
import { type Notice, USUAL } from './notices'

/** Webhooks: URLs that the server requests when jobs change, with the outcome of the last requests. */
export function Webhooks() {
  const { submits } = useSession()
  const webhooks = useQuery({
    queryKey: ['webhooks'],
    queryFn: async ({ signal }) => (await api.GET('/v1/webhooks', { signal })).data!.webhooks,
  })
  return (
    <>
      <Answer of={webhooks}>
        {(found) =>
          found.length > 0 ? (
            found.map((webhook) => <OneWebhook key={webhook.id} webhook={webhook} />)
          ) : (
            <Nothing>There are no webhooks.</Nothing>
          )
        }
      </Answer>
      {submits && <NewWebhook />}
    </>
  )
}

const COVERED = { own: 'own jobs', all: 'all jobs' }

function OneWebhook({ webhook }: { webhook: Webhook }) {
  const { submits } = useSession()
  const [isAsked, setAsked] = useState(false)
  const params = { path: { webhook_id: webhook.id } }
  const test = useChange(
    () => api.POST('/v1/webhooks/{webhook_id}:test', { params }),
    [['deliveries', webhook.id], ['webhooks']],
  )
  const remove = useChange(() => api.DELETE('/v1/webhooks/{webhook_id}', { params }), [['webhooks']])
  return (
    <section aria-label={`Webhook ${webhook.url}`}>
      <h3 style={{ overflowWrap: 'anywhere' }}>{webhook.url}</h3>
      <p>
        {webhook.covers === 'team' ? `jobs of team ${webhook.team}` : COVERED[webhook.covers]}
        {webhook.owner && ` of ${webhook.owner}`}; sent when a job is {webhook.events.join(', ')}
      </p>
      {webhook.disabled_at ? (
        <p>
          It has been disabled since {localTime(webhook.disabled_at)}: {webhook.disabled_reason}. A test that arrives
          enables it.
        </p>
      ) : (
        webhook.failing_since && <p>Requests have failed since {localTime(webhook.failing_since)}.</p>
      )}
      {submits && (
        <div className="row">
          <Button
            size="compact-sm"
            variant="default"
            loading={test.isPending}
            aria-label={`Test webhook ${webhook.url}`}
            onClick={() => test.mutate(undefined)}
          >
            Test
          </Button>
          <Button
            size="compact-sm"
            variant="default"
            aria-label={`Remove webhook ${webhook.url}`}
            onClick={() => setAsked(true)}
          >
            Remove
          </Button>
        </div>
      )}
      {test.error && <Failure error={test.error} />}
      <Deliveries id={webhook.id} isWatched={test.isSuccess} />
      {isAsked && (
        <Confirm
          title="Remove webhook"
          verb="Remove"
          isPending={remove.isPending}
          error={remove.error}
          onConfirm={() => remove.mutate(undefined)}
          onClose={() => setAsked(false)}
        >
          <p>Messages that wait to be sent to {webhook.url} are dropped.</p>
        </Confirm>
      )}
    </section>
  )
}

/** The last messages to a webhook; after a test they are requested until the outcome is known. */
function Deliveries({ id, isWatched }: { id: string; isWatched: boolean }) {
  const deliveries = useQuery({
    queryKey: ['deliveries', id],
    queryFn: async ({ signal }) => {
      const params = { path: { webhook_id: id }, query: { limit: 5 } }
      return (await api.GET('/v1/webhooks/{webhook_id}/deliveries', { params, signal })).data!.deliveries
    },
    refetchInterval: ({ state }) =>
      afterFailure(state) || (isWatched && state.data?.some((each) => each.state === 'WAITING') && 1000),
  })
  return (
    <Answer of={deliveries}>
      {(found) =>
        found.length === 0 ? (
          <Nothing>Nothing was sent in the last seven days.</Nothing>
        ) : (
          <ul aria-label="Last messages" style={{ fontSize: 13.5 }}>
            {found.map((each) => (
              <li key={each.id}>
                {localTime(each.created_at)}: {each.event}, {each.state.toLowerCase()}
                {each.status !== null && `, status ${each.status}`}
                {each.error !== null && `: ${each.error}`}
              </li>
            ))}
          </ul>
        )
      }
    </Answer>
  )
}

function NewWebhook() {
  const { user, administers, has_accounts } = useSession()
  const [url, setUrl] = useState('')
  const [events, setEvents] = useState<Notice[]>([...USUAL])
  const [covers, setCovers] = useState('own')
  const add = useChange(async () => {
    const jobs =
      !has_accounts || covers === 'all'
        ? { covers: 'all' as const }
        : covers === 'own'
          ? { covers: 'own' as const }
          : { covers: 'team' as const, team: covers.replace('team ', '') }
    return (await api.POST('/v1/webhooks', { body: { url, events, ...jobs } })).data!
  }, [['webhooks']])
  const managed = Object.entries(user?.teams ?? {}).filter(([, role]) => role === 'admin')
  const choices = [
    { value: 'own', label: 'your jobs' },
    ...managed.map(([team]) => ({ value: `team ${team}`, label: `jobs of team ${team}` })),
    ...(administers ? [{ value: 'all', label: 'all jobs' }] : []),
  ]
  if (add.data)
    return (
      <Once onDone={() => add.reset()}>
        <CopyField label="Secret that signs the requests, which is shown once" text={add.data.secret} />
      </Once>
    )
  return (
    <Fields action="Add webhook" isPending={add.isPending} error={add.error} onSubmit={() => add.mutate(undefined)}>
      <TextInput
        label="URL of the new webhook"
        type="url"
        placeholder="https://ci.example.org/"
        required
        withAsterisk={false}
        value={url}
        onChange={(event) => setUrl(event.currentTarget.value)}
      />
      {choices.length > 1 && (
        <Choose label="Jobs" options={choices} value={covers} onChange={(chosen) => setCovers(chosen ?? 'own')} />
      )}
      <Notices value={events} onChange={setEvents} />
    </Fields>
  )
}
