import { expect, test } from 'vitest'
import { type Run, wordDifferences } from './words'

const marked = (runs: Run[]) => runs.map(({ text, isOwn }) => (isOwn ? `[${text}]` : text)).join('')

test.each([
  ['the answer is 4', 'the answer is 5', 'the answer is [4]', 'the answer is [5]'],
  ['same', 'same', 'same', 'same'],
  ['', 'new words', '', '[new words]'],
  ['a b c d', 'a c d e', 'a [b ]c d', 'a c d[ e]'],
  ['12.5', '12,5', '12[.]5', '12[,]5'],
  ['größer als', 'größer', 'größer[ als]', 'größer'],
  ['ab ab', 'ab', 'ab[ ab]', 'ab'],
])('%j and %j', (a, b, left, right) => {
  expect(wordDifferences(a, b).map(marked)).toEqual([left, right])
})

test('the runs joined are the texts, also of long ones', () => {
  const long = (word: string) => Array.from({ length: 3000 }, (_, k) => (k % 3 ? word : `same${k}`)).join(' ')
  for (const [a, b] of [
    [long('x'), long('y')],
    ['one two\n three', 'one  two four'],
  ] as const) {
    const found = wordDifferences(a, b)
    expect(found.map((runs) => runs.map(({ text }) => text).join(''))).toEqual([a, b])
  }
})
