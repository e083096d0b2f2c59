import { expect, test } from 'vitest'
import { loginProblem } from './loginProblem'

test('codes of failed logins have texts, and no text of a link is shown', () => {
  expect(loginProblem('expired')).toMatch(/^There is no such login/)
  expect(loginProblem('user')).toMatch(/^You may not log in/)
  expect(loginProblem('unavailable')).toMatch(/^The identity provider cannot be used/)
  for (const code of ['refused', 'Call 555 0100', 'constructor']) {
    expect(loginProblem(code)).toMatch(/^The answer of the identity provider is not accepted/)
  }
})
