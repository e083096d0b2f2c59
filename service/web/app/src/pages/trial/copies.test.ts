import { expect, test } from 'vitest'
import type { Recipe } from '../../api/types'
import { continuingStudy, curlCommand, elsewhere, mergeCommand, quoted } from './copies'

const RECIPE = { models: { base: 'b0', math: 'm1', 'my expert': 'e2' } } as unknown as Recipe
const MODELS = { base: '/models/base', experts: { math: 'owner/math@main', 'my expert': "/models/it's" } }

test('words with special characters are quoted for a shell', () => {
  expect(quoted('/models/base')).toBe('/models/base')
  expect(quoted("it's a model")).toBe(`'it'\\''s a model'`)
  expect(quoted('$HOME')).toBe(`'$HOME'`)
})

test('models that are no directories are left for the user to name', () => {
  const command = mergeCommand('http://host/team', '5f', 3, RECIPE, MODELS)
  expect(command).toBe(
    'mergesearch recipe 5f 3 --server http://host/team > trial-3.json\n' +
      `mergesearch merge trial-3.json --out trial-3 \\\n  --model base=/models/base \\\n  --model math=DIRECTORY \\\n  --model 'my expert=/models/it'\\''s'`,
  )
  expect(elsewhere(RECIPE, MODELS)).toEqual(['math'])
})

test('the token is read from a variable, and only where there are accounts', () => {
  expect(curlCommand('http://host', '5f', 3, false)).toBe(
    'curl --fail -o trial-3.json http://host/v1/studies/5f/trials/3/recipe',
  )
  expect(curlCommand('http://host', '5f', 3, true)).toContain('-H "Authorization: Bearer $MERGESEARCH_TOKEN"')
})

test('a study that continues has the merge as a source, and nothing that was learned without it', () => {
  const file = {
    name: 'n'.repeat(63),
    models: { base: '/b', experts: { 'trial-3': '/m' }, tokenizer: 'base' },
    search: { seed: 1, warm_start: { id: 'x' }, hm3: { iterations: 3, start: { id: 'y' } } },
    limits: {},
  }
  const made = continuingStudy(file, '5f', 3)
  expect(made.name).toBe(`${'n'.repeat(56)}-from-3`)
  expect(made.models).toEqual({
    base: '/b',
    experts: { 'trial-3': '/m', 'trial-3-': { from_study: { id: '5f', trial: 3 } } },
    tokenizer: 'base',
  })
  expect(made.search).toEqual({ seed: 1, hm3: { iterations: 3, start: null } })
  expect(file.search.warm_start).toEqual({ id: 'x' })
})
