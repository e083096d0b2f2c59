import { Alert, Button, TextInput } from '@mantine/core'
import { useMutation } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useState } from 'react'
import { BASE, api } from '../../api/client'
import { useSession } from '../../api/session'
import { loginProblem } from '../../loginProblem'
import { ownPath } from '../../next'
import { Failure } from '../../parts/Answer'
import { Page } from '../../parts/Page'
import { loginRoute } from '../../router'

/** The login, with a token or with the identity provider of the server. It leads to the view that needed it. */
export function Login() {
  const { next, problem } = loginRoute.useSearch()
  const { has_accounts, has_identity_provider, user } = useSession()
  return (
    <Page title="Log in">
      <div className="narrow">
        {problem && (
          <Alert color="red" variant="outline" title="The login has failed" my="sm">
            {loginProblem(problem)}
          </Alert>
        )}
        {has_accounts && user === null ? (
          <>
            {has_identity_provider && <SingleSignOn next={ownPath(next)} />}
            <WithToken next={ownPath(next)} />
          </>
        ) : (
          <p>
            {user ? `You are logged in as ${user.name}.` : 'This server has no accounts: nobody needs to log in.'}{' '}
            <Link to="/studies">The list of studies</Link>
          </p>
        )}
      </div>
    </Page>
  )
}

function SingleSignOn({ next }: { next: string }) {
  return (
    <>
      <Button component="a" href={`${BASE}/v1/login?${new URLSearchParams({ next: BASE + next })}`}>
        Log in with single sign-on
      </Button>
      <h2>With a token</h2>
    </>
  )
}

function WithToken({ next }: { next: string }) {
  const [token, setToken] = useState('')
  const login = useMutation({
    mutationFn: () => api.POST('/v1/session', { body: { token: token.trim() } }),
    // The page is loaded anew, so that nothing of an earlier user stays in it.
    onSuccess: () => location.replace(BASE + next),
  })
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault()
        login.mutate()
      }}
    >
      <TextInput
        label="Token"
        description={
          <>
            An administrator gives you one, or <code>mergesearch tokens create</code> on the machine of the server. The
            page sends it once, and keeps a session that ends with it.
          </>
        }
        type="password"
        autoComplete="current-password"
        required
        withAsterisk={false}
        value={token}
        onChange={(event) => setToken(event.currentTarget.value)}
      />
      <Button type="submit" mt="sm" loading={login.isPending || login.isSuccess}>
        Log in
      </Button>
      {login.error && <Failure error={login.error} />}
    </form>
  )
}
