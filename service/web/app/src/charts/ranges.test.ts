import { expect, test } from 'vitest'
import { type Axis, type Range, axisOf } from './axes'
import { asked, rangesOf, selection, without, written } from './ranges'

const axis = (values: (number | string | null)[], column = 'parameter.p') => axisOf(column, values)!

const through = (own: Axis, range: Range) => rangesOf([own], asked(written([own], { [own.column]: range })))

test('an address has the ends that are not those of the axis', () => {
  const axes = [axis([0, 4], 'value.math'), axis(['a', 'b', 'c'], 'parameter.m')]
  const of = (math: Range, m: Range) => written(axes, { 'value.math': math, 'parameter.m': m })
  expect(of([0, 4], [0, 2])).toBeUndefined()
  expect(of([0.1 + 0.2, 4], [0, 1])).toBe('value.math:0.3:,parameter.m::b')
  expect(written(axes, {})).toBeUndefined()
})

test('ranges come back from an address as they were', () => {
  const long = 1 / 3
  for (const [own, range] of [
    [axis([0, 4]), [1, 2]],
    [axis([0, long]), [long, long]],
    [axis([-0.5, 0.25]), [-0.25, 0.25]],
    [axis(['a', 'b', 'c']), [1, 1]],
    [axis(['a:b,%', 'c', 'd']), [0, 0]],
    [axis(['a', null, 'b']), [0, 0]],
  ] as [Axis, Range][])
    expect(through(own, range)[own.column]).toEqual(range)
})

test('the ends of a logarithmic axis stay its ends', () => {
  const own = axis([0.00012345678901234567, 0.0031234567890123456, 0.9876543210987654])
  expect(own.kind).toBe('log')
  const top = own.extent[1]
  expect(through(own, [top, top])['parameter.p']).toEqual([top, top])
  const bottom = own.extent[0]
  expect(through(own, [bottom, bottom])['parameter.p']).toEqual([bottom, bottom])
  expect(through(own, [-2, top])['parameter.p']![0]).toBeCloseTo(-2, 9)
})

test('trials without a value have a range of their own', () => {
  for (const own of [axis([0.5, null, 1]), axis(['a', null, 'none'])]) {
    const none: Range = [own.extent[0], own.extent[0]]
    expect(written([own], { 'parameter.p': none })).toBe('parameter.p:none')
    expect(through(own, none)['parameter.p']).toEqual(none)
  }
  expect(rangesOf([axis([0.5, 1])], asked('parameter.p:none'))).toEqual({})
})

test('what is no range is left out', () => {
  const own = axis([0, 4])
  for (const text of [undefined, '', 'parameter.p', 'parameter.p::', 'parameter.p:x:', 'parameter.p:1:2:3', '%:1:2'])
    expect(rangesOf([own], asked(text))).toEqual({})
  expect(asked(Array.from({ length: 99 }, (_, k) => `c${k}:1:2`).join(',')).size).toBe(16)
})

test('a range is taken out of an address', () => {
  expect(without('a:1:,b%3A:2:3', 'b:')).toBe('a:1:')
  expect(without('a:1:', 'a')).toBeUndefined()
  expect(without(undefined, 'a')).toBeUndefined()
})

const COLUMNS = {
  number: [3, 4, 5, 6, 7],
  origin: ['source', 'search', 'search', 'search', 'search'],
  samples: [30, 30, 90, 90, null],
  'parameter.k': [null, 0.1, 0.5, null, 0.5],
  'parameter.m': [null, 'a', 'c', 'b', 'a'],
}

test('proposed trials within all ranges are selected', () => {
  const of = (text: string) => {
    const found = selection(COLUMNS, asked(text))
    return found && [[...found.trials], found.total, found.words]
  }
  expect(of('samples:90:')).toEqual([[5, 6], 3, ['samples 90']])
  expect(of('samples:90:,parameter.k:0.2:')).toEqual([[5], 3, ['samples 90', 'k at least 0.2']])
  expect(of('parameter.k::0.2')).toEqual([[4, 6], 3, ['k at most 0.2 or none']])
  expect(of('parameter.k:none')).toEqual([[6], 3, ['k none']])
  expect(of('parameter.m::a')).toEqual([[4], 3, ['m a']])
  expect(of('parameter.m:b:')).toEqual([[5, 6], 3, ['m b to c']])
  expect(of('samples:40:80')).toEqual([[], 3, ['samples 40 to 80']])
  expect(of('parameter.other:1:2')).toBeUndefined()
  expect(selection(COLUMNS, asked(undefined))).toBeUndefined()
})

test('a range above all values selects none of them', () => {
  const { trials, words } = selection(COLUMNS, asked('samples:900:'))!
  expect([trials.size, words]).toEqual([0, ['samples at least 900']])
})
