import { QueryClient } from '@tanstack/react-query'
import { afterEach, expect, test, vi } from 'vitest'
import { api } from './client'
import { type ReadColumns, type TrialColumns, merged } from './columns'
import { columns } from './queries'

const known: TrialColumns = {
  columns: { number: [0, 1, 2], state: ['COMPLETE', 'RUNNING', 'WAITING'], 'value.math': [0.5, null, null] },
  event: 10,
}

const read = (columns: ReadColumns['columns'], event = 11, is_whole = false): ReadColumns => ({
  columns,
  event,
  is_whole,
})

test('changed trials take the place of their rows, and new trials follow', () => {
  const found = merged(
    known,
    read({ number: [1, 3, 4], state: ['PRUNED', 'WAITING', 'FAIL'], 'value.math': [0.25, null, 0.75] }),
  )
  expect(found).toEqual({
    columns: {
      number: [0, 1, 2, 3, 4],
      state: ['COMPLETE', 'PRUNED', 'WAITING', 'WAITING', 'FAIL'],
      'value.math': [0.5, 0.25, null, null, 0.75],
    },
    event: 11,
  })
  expect(known.columns.number, 'what a chart has is not changed under it').toEqual([0, 1, 2])
})

test('columns that appear later have no value in earlier trials', () => {
  const found = merged(
    known,
    read({ number: [2, 3], state: ['RUNNING', 'WAITING'], 'value.code': [0.1, null], 'parameter.a': [null, 3] }),
  )
  expect(found.columns).toEqual({
    number: [0, 1, 2, 3],
    state: ['COMPLETE', 'RUNNING', 'RUNNING', 'WAITING'],
    'value.math': [0.5, null, null, null],
    'value.code': [null, null, 0.1, null],
    'parameter.a': [null, null, null, 3],
  })
})

test('a column that the answer leaves out has no value in its trials', () => {
  const found = merged(known, read({ number: [0], state: ['COMPLETE'] }))
  expect(found.columns['value.math']).toEqual([null, null, null])
})

test('all trials replace those before', () => {
  const all = { number: [0], 'value.text': [0.9] }
  expect(merged(known, read(all, 3, true))).toEqual({ columns: all, event: 3 })
  expect(merged(undefined, read(all, 3, true))).toEqual({ columns: all, event: 3 })
})

test('what has not changed is the same object', () => {
  expect(merged(known, read({ number: [], state: [] }))).toEqual({ ...known, event: 11 })
  const again = read({ number: [1], state: ['RUNNING'], 'value.math': [null] })
  for (const none of [read({ number: [], state: [] }), again]) expect(merged(known, none).columns).toBe(known.columns)
  const found = merged(known, read({ number: [1], state: ['PRUNED'], 'value.math': [null] }))
  expect(found.columns.state).not.toBe(known.columns.state)
  expect(found.columns.number).toBe(known.columns.number)
  expect(found.columns['value.math']).toBe(known.columns['value.math'])
})

test('a study without trials gets its first', () => {
  const found = merged({ columns: { number: [] }, event: 1 }, read({ number: [0, 1], 'value.math': [1, null] }))
  expect(found.columns).toEqual({ number: [0, 1], 'value.math': [1, null] })
})

afterEach(() => vi.restoreAllMocks())

test('the query asks for what has changed, and for all trials once the page has none', async () => {
  const answers = [
    read({ number: [0, 1], label: ['a', 'b'] }, 7, true),
    read({ number: [1, 2], label: ['B', 'c'] }, 9),
    read({ number: [0], label: ['new'] }, 2, true),
    read({ number: [0], label: ['again'] }, 4, true),
  ]
  const asked: unknown[] = []
  vi.spyOn(api, 'GET').mockImplementation(async (_: unknown, sent: unknown) => {
    asked.push((sent as { params: { query: unknown } }).params.query)
    return { data: answers[asked.length - 1], response: new Response() } as never
  })
  const client = new QueryClient()
  const options = { ...columns('a', 'number,label'), staleTime: 0 }
  expect((await client.fetchQuery(options)).columns).toEqual({ number: [0, 1], label: ['a', 'b'] })
  expect((await client.fetchQuery(options)).columns).toEqual({ number: [0, 1, 2], label: ['a', 'B', 'c'] })
  expect((await client.fetchQuery(options)).columns).toEqual({ number: [0], label: ['new'] })
  client.clear()
  expect((await client.fetchQuery(options)).columns).toEqual({ number: [0], label: ['again'] })
  const fields = 'number,label'
  expect(asked).toEqual([{ fields }, { fields, since: 7 }, { fields, since: 9 }, { fields }])
})
