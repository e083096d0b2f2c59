import { expect, test } from 'vitest'
import { asYaml, changed, isJson, moved, parsed, pathOf, rangeOf, renamed, valueAt } from './yamlText'

const TEXT = `# About this study.
name: first # a name
models:
  base: /models/base
  experts: {math: /models/math} # the only one
search: {max_trials: 4, seed: 0}
objectives:
  # The first task.
  - {name: math, task: gsm8k, metric: exact_match}
`

test('a changed value leaves all other text as it is', () => {
  expect(changed(TEXT, ['name'], 'second')).toBe(TEXT.replace('name: first', 'name: second'))
  expect(changed(TEXT, ['search', 'max_trials'], 60)).toBe(TEXT.replace('max_trials: 4', 'max_trials: 60'))
  expect(changed(TEXT, ['objectives', 0, 'metric'], 'acc')).toBe(TEXT.replace('exact_match', 'acc'))
})

test('a new value is added, with what must contain it', () => {
  expect(changed(TEXT, ['search', 'algorithm'], 'tpe')).toContain('{max_trials: 4, seed: 0, algorithm: tpe}')
  expect(changed(TEXT, ['fidelity', 'rungs'], [30, 90])).toBe(`${TEXT}fidelity:\n  rungs: [30, 90]\n`)
  expect(changed('', ['name'], 'x')).toBe('name: x\n')
  expect(parsed(changed('models:\n', ['models', 'base'], 'b')).content).toEqual({ models: { base: 'b' } })
})

test('a value that is taken out takes what is empty with it', () => {
  const given = changed(TEXT, ['fidelity', 'eta'], 3)
  expect(changed(given, ['fidelity', 'eta'], undefined)).toBe(TEXT)
  expect(changed(TEXT, ['search', 'seed'], undefined)).toBe(TEXT.replace('4, seed: 0', '4'))
})

test('text stays text, and numbers stay numbers', () => {
  expect(valueAt(parsed(changed(TEXT, ['name'], '12')).content, ['name'])).toBe('12')
  expect(valueAt(parsed(changed('x: "4"\n', ['x'], 5)).content, ['x'])).toBe(5)
})

test('an expert is renamed in its place', () => {
  expect(renamed(TEXT, ['models', 'experts'], 'math', 'logic')).toBe(TEXT.replace('{math:', '{logic:'))
})

test('places are those of the value or of what contains it', () => {
  const [start, stop] = rangeOf(TEXT, ['search', 'max_trials'])
  expect(TEXT.slice(start, stop)).toBe('4')
  expect(TEXT.slice(...rangeOf(TEXT, pathOf('objectives.0.split')))).toBe(
    '{name: math, task: gsm8k, metric: exact_match}',
  )
})

test('text that is no mapping has an error', () => {
  expect(parsed('a: [').error).toBeDefined()
  expect(parsed('- a').error).toBeDefined()
  expect(parsed('').content).toEqual({})
})

test('a document is written with short lists in a line', () => {
  expect(asYaml({ a: [1, 2], b: [{ c: 'x' }], d: [] })).toBe('a: [1, 2]\nb:\n  - c: x\nd: []\n')
})

test('a value is moved with its comments', () => {
  const text = 'name: a\ndata:\n  file: /x # mine\n  split: train\n'
  expect(moved(text, ['data'], ['experts', 'e', 'data'])).toBe(
    'name: a\nexperts:\n  e:\n    data:\n      file: /x # mine\n      split: train\n',
  )
  expect(moved(text, ['absent'], ['b'])).toBe(text)
})

test('JSON that was edited as YAML is no JSON', () => {
  const json = JSON.stringify({ a: null, b: 1 }, null, 2)
  expect(isJson(json)).toBe(true)
  expect(isJson(changed(json, ['a'], 'text'))).toBe(false)
  expect(isJson('a: 1')).toBe(false)
})
