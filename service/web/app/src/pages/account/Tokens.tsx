import { Button } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { api } from '../../api/client'
import { useChange } from '../../api/change'
import { useSession } from '../../api/session'
import type { Token } from '../../api/types'
import { localTime } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Confirm } from '../../parts/Confirm'
import { NewToken } from './NewToken'

/** The tokens of a user: what each may do and until when; tokens are created and revoked here. */
export function Tokens({ user }: { user: string }) {
  const { manages } = useSession()
  const tokens = useQuery({
    queryKey: ['tokens', user],
    queryFn: async ({ signal }) => (await api.GET('/v1/tokens', { params: { query: { user } }, signal })).data!.tokens,
  })
  return (
    <>
      <Answer of={tokens}>
        {(found) => (found.length > 0 ? <Table tokens={found} /> : <Nothing>{user} has no tokens.</Nothing>)}
      </Answer>
      {manages ? (
        <NewToken user={user} />
      ) : (
        <p className="soft">
          Tokens are created and revoked with a session or a token of the scope admin, or with{' '}
          <code>mergesearch tokens</code> on the machine of the server.
        </p>
      )}
    </>
  )
}

function stateOf(token: Token): string {
  if (token.revoked_at !== null) return 'revoked'
  if (token.expires_at !== null && Date.parse(token.expires_at) < Date.now()) return 'expired'
  return 'valid'
}

function Table({ tokens }: { tokens: Token[] }) {
  const { manages } = useSession()
  const [asked, setAsked] = useState<Token>()
  const revoke = useChange(
    async (token: Token) => {
      await api.DELETE('/v1/tokens/{token_id}', { params: { path: { token_id: token.id } } })
      setAsked(undefined)
    },
    [['tokens']],
  )
  const isValid = (token: Token) => stateOf(token) === 'valid'
  const ordered = [...tokens.filter(isValid), ...tokens.filter((token) => !isValid(token))]
  return (
    <>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Table of tokens">
        <table className="data">
          <thead>
            <tr>
              {['name', 'begins with', 'scope', 'state'].map((head) => (
                <th key={head} scope="col" className="l">
                  {head}
                </th>
              ))}
              <th scope="col">created</th>
              <th scope="col">expires</th>
              <th scope="col">last used</th>
              <th scope="col">
                <span className="soft">actions</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {ordered.map((token) => (
              <tr key={token.id} className={isValid(token) ? '' : 'soft'}>
                <th scope="row" className="l">
                  {token.name}
                </th>
                <td className="l">
                  <code>{token.prefix}</code>
                </td>
                <td className="l">{token.scope}</td>
                <td className="l">{stateOf(token)}</td>
                <td title={token.created_at}>{localTime(token.created_at)}</td>
                <td title={token.expires_at ?? undefined}>
                  {token.expires_at ? localTime(token.expires_at) : 'never'}
                </td>
                <td title={token.last_used_at ?? undefined}>
                  {token.last_used_at ? localTime(token.last_used_at) : 'not yet'}
                </td>
                <td>
                  {manages && isValid(token) && (
                    <Button
                      size="compact-xs"
                      variant="default"
                      aria-label={`Revoke token ${token.name}`}
                      onClick={() => setAsked(token)}
                    >
                      Revoke
                    </Button>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {asked && (
        <Confirm
          title={`Revoke token ${asked.name}`}
          verb="Revoke"
          isPending={revoke.isPending}
          error={revoke.error}
          onConfirm={() => revoke.mutate(asked)}
          onClose={() => setAsked(undefined)}
        >
          <p>Programs that use it, and sessions that it began, are refused within a second. It cannot be undone.</p>
        </Confirm>
      )}
    </>
  )
}
