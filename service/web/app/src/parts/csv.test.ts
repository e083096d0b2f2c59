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

test.each(['=1+1', '+1', '-1+2', '@SUM(A1)', '\t=1', '＝1', '＋1', '－1', '＠a'])(
  'the text %j does not run as a formula',
  (text) => {
    expect(csv([text], [[text]])).toBe(`'${text}\r\n`.repeat(2))
  },
)

test('a guarded text is quoted as others', () => {
  expect(csv(['a', 'b', 'c'], [['=HYPERLINK("x","y")', '\r=1', '\n=1']])).toBe(
    `a,b,c\r\n"'=HYPERLINK(""x"",""y"")","'\r=1","'\n=1"\r\n`,
  )
})

test('numbers stay numbers, and other texts stay as they are', () => {
  expect(csv(['a', 'b', 'c', 'd'], [[-0.5, 1e-7, "it's", 'a=-1']])).toBe("a,b,c,d\r\n-0.5,1e-7,it's,a=-1\r\n")
})
