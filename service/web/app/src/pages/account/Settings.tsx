import { SegmentedControl, useMantineColorScheme } from '@mantine/core'
import { useState } from 'react'
import { useSession } from '../../api/session'
import { MAX_DECIMALS, MIN_DECIMALS, decimals, interval, localTime, setDecimals, value } from '../../format'
import { Page } from '../../parts/Page'
import { Mail } from './Mail'
import { Tokens } from './Tokens'
import { Webhooks } from './Webhooks'

/** What a user sets for oneself: tokens, webhooks, the e-mail address, and the colours and numbers of the page. */
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
      <h2>Numbers</h2>
      <Decimals />
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

/** How many decimals values have in all views of this browser. */
function Decimals() {
  const [chosen, setChosen] = useState(decimals)
  const choices = Array.from({ length: MAX_DECIMALS - MIN_DECIMALS + 1 }, (_, k) => `${MIN_DECIMALS + k}`)
  return (
    <>
      <SegmentedControl
        aria-label="Decimals of values"
        data={choices}
        value={`${chosen}`}
        onChange={(text) => {
          setDecimals(Number(text))
          setChosen(Number(text))
        }}
      />
      <p className="soft">
        A value with its interval: {value(0.7843217)} <span className="interval">{interval(0.7561982, 0.8114309)}</span>
      </p>
    </>
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
