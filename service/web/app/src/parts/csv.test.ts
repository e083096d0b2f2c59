import { expect, test } from 'vitest'
import { csv } from './csv'

test('fields with separators are quoted, and missing ones are empty', () => {
  expect(
    csv(
      ['label', 'math'],
      [
        ['a, "b"', 0.25],
        [undefined, null],
      ],
    ),
  ).toBe('label,math\r\n"a, ""b""",0.25\r\n,\r\n')
})
