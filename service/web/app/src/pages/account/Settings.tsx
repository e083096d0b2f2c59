import { SegmentedControl, useMantineColorScheme } from '@mantine/core'
import { useSession } from '../../api/session'
import { localTime } from '../../format'
import { Page } from '../../parts/Page'
import { Mail } from './Mail'
import { Tokens } from './Tokens'
import { Webhooks } from './Webhooks'

/** What a user sets for oneself: tokens, webhooks, the e-mail address, and the colours of the page. */
export function Settings() {
  const { user } = useSession()
  return (
    <Page title="Settings">
      <h2>Account</h2>
      <Account />
      {user && (
        <>
          <h2>Tokens</h2>
          <Tokens user={user.name} />
        </>
      )}
      <h2>Webhooks</h2>
      <p className="soft">The server sends a signed request to each URL when jobs change.</p>
      <Webhooks />
      {user && (
        <>
          <h2>E-mail</h2>
          <Mail user={user.name} />
        </>
      )}
      <h2>Colours</h2>
      <Colours />
    </Page>
  )
}

function Account() {
  const { user, scope, expires_at } = useSession()
  if (user === null)
    return (
      <>
        <p>
          This server has no accounts: everybody who reaches it may do everything. The first administrator is added on
          the machine of the server, and requests need a token from then on:
        </p>
        <pre style={{ whiteSpace: 'pre-wrap' }}>{`mergesearch users add NAME --admin
mergesearch tokens create --user NAME --scope admin`}</pre>
      </>
    )
  const teams = Object.entries(user.teams).map(([team, role]) => `${team} (${role})`)
  return (
    <p>
      {user.name}, {user.is_admin ? 'administrator of the server, ' : ''}
      {teams.length > 0 ? `in ${teams.length === 1 ? 'team' : 'the teams'} ${teams.join(', ')}` : 'a member of no team'}
      . The session has the scope {scope}
      {expires_at && `, and ends at ${localTime(expires_at)}`}.
    </p>
  )
}

function Colours() {
  const { colorScheme, setColorScheme } = useMantineColorScheme()
  return (
    <SegmentedControl
      aria-label="Colours"
      data={[
        { value: 'auto', label: 'as the system' },
        { value: 'light', label: 'light' },
        { value: 'dark', label: 'dark' },
      ]}
      value={colorScheme}
      onChange={(chosen) => setColorScheme(chosen as typeof colorScheme)}
    />
  )
}
