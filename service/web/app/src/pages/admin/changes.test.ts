import { expect, test } from 'vitest'
import { changesOf } from './changes'
import { movesOf } from './moves'
import type { QueueEntry } from '../../api/types'

test('only fields that differ are changes, nested ones by their path', () => {
  const before = { limits: { weight: 1, gpu_hours: null }, members: { ann: 'viewer' }, same: [1] }
  const after = { limits: { weight: 2, gpu_hours: null }, members: { bob: 'member' }, same: [1] }
  expect(changesOf(before, after)).toEqual([
    { field: 'limits.weight', before: '1', after: '2' },
    { field: 'members.ann', before: 'viewer' },
    { field: 'members.bob', after: 'member' },
  ])
})

test('what is added or removed has one side', () => {
  expect(changesOf(null, { is_admin: true })).toEqual([{ field: 'is_admin', after: 'true' }])
  expect(changesOf({ expires_at: null, name: 'a' }, null)).toEqual([{ field: 'name', before: 'a' }])
  expect(changesOf(null, null)).toEqual([])
})

const entry = (id: string, priority: number): QueueEntry => ({
  position: 1,
  waiting_for: null,
  estimated_start: null,
  job: {
    id,
    priority,
    name: id,
    kind: 'search',
    state: 'CREATED',
    owner: null,
    team: null,
    created_at: '2026-01-01T00:00:00Z',
    link: '',
  },
})

test('a job moves among the jobs of its priority only', () => {
  const hidden: QueueEntry = { position: 2, waiting_for: null, estimated_start: null, job: null }
  const entries = [entry('x', 5), entry('a', 0), hidden, entry('b', 0), entry('c', 0)]
  const moves = entries.map((each) => movesOf(entries, each).map(({ verb, job, before }) => [verb, job, before]))
  expect(moves).toEqual([
    [],
    [['Later', 'b', 'a']],
    [],
    [
      ['Earlier', 'b', 'a'],
      ['Later', 'c', 'b'],
    ],
    [
      ['First', 'c', undefined],
      ['Earlier', 'c', 'b'],
    ],
  ])
})
