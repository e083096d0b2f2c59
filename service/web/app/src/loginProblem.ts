const REFUSED = 'The answer of the identity provider is not accepted. The log of the server has the reason.'

const TEXTS = new Map([
  [
    'expired',
    'There is no such login: it took too long, has ended already, or was begun in another browser. Log in again.',
  ],
  ['user', 'You may not log in to this server. An administrator of the server finds the reason in the audit log.'],
  ['unavailable', 'The identity provider cannot be used at the moment. The log of the server has the reason.'],
])

/** Text about a failed login with the identity provider; `code` is in the page's address, which anybody may write. */
export function loginProblem(code: string): string {
  return TEXTS.get(code) ?? REFUSED
}
