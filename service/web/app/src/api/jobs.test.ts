import { expect, test } from 'vitest'
import { isFinished, silence } from './jobs'

test('a failed job has ended, a paused one has not', () => {
  expect(isFinished({ state: 'FAILED' })).toBe(true)
  expect(isFinished({ state: 'PAUSED' })).toBe(false)
})

test('only a running job whose driver is late is silent', () => {
  const heartbeat_at = '2026-01-01T00:00:00.000Z'
  const now = Date.parse(heartbeat_at)
  expect(silence({ state: 'RUNNING', heartbeat_at }, now + 190_000)).toBe(190)
  expect(silence({ state: 'RUNNING', heartbeat_at }, now + 12_000)).toBeUndefined()
  expect(silence({ state: 'COMPLETE', heartbeat_at }, now + 190_000)).toBeUndefined()
  expect(silence({ state: 'RUNNING', heartbeat_at: null }, now)).toBeUndefined()
})
