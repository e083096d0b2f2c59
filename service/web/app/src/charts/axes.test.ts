import { expect, test } from 'vitest'
import { type Axis, axesOf, axisOf, conditions, rangeOf, within } from './axes'

const made = (values: (number | string | boolean | null)[], column = 'parameter.p') => axisOf(column, values)!

test('numbers are positions; ends are marked', () => {
  const axis = made([0.25, -1, 3.5])
  expect([axis.kind, axis.name, axis.extent, axis.marks]).toEqual(['linear', 'p', [-1, 3.5], [-1, 3.5]])
  expect(axis.text(-1)).toBe('−1')
})

test('values that span three decades are logarithmic', () => {
  const axis = made([0.001, 1, 0.1])
  expect(axis.kind).toBe('log')
  expect([...axis.positions]).toEqual([-3, 0, -1])
  expect(axis.text(-1)).toBe('0.1')
})

test('evenly spread values are linear, although one is very small', () => {
  expect(made([0.00001, 0.4, 0.5, 0.7, 1]).kind).toBe('linear')
})

test('categories and switches are positions with names', () => {
  const axis = made(['ties', 'linear', 'ties'])
  expect([...axis.positions]).toEqual([1, 0, 1])
  expect(axis.marks.map(axis.text)).toEqual(['linear', 'ties'])
  expect(made([true, false]).marks.map(made([true, false]).text)).toEqual(['false', 'true'])
})

test('a trial without a value is below the lowest one', () => {
  for (const values of [
    [0.5, null, 1],
    [3, null, 4],
    [3, null, 3],
    ['ties', null],
    [0.001, null, 10, 0.01],
  ]) {
    const axis = made(values)
    expect(axis.positions[1]).toBe(axis.extent[0])
    expect(axis.extent[0]).toBeLessThan(axis.lowest)
    expect(axis.marks.map(axis.text)[0]).toBe('none')
    expect(axis.text(axis.lowest)).not.toBe('none')
  }
})

test('constant columns have no axis', () => {
  const { axes, constant } = axesOf({ a: [1, 1], b: [1, 2], c: ['x', 'x'], d: [null, null] }, ['a', 'b', 'c', 'd', 'e'])
  expect(axes.map((axis) => axis.column)).toEqual(['b'])
  expect(constant).toEqual(['a', 'c', 'd'])
})

test('trials within all ranges are kept', () => {
  const axes = [made([1, 2, 3, 4]), made(['a', 'b', null, 'b'])]
  expect(
    within(
      axes,
      axes.map((axis) => axis.extent),
    ),
  ).toEqual([0, 1, 2, 3])
  expect(
    within(axes, [
      [2, 4],
      [0, 1],
    ]),
  ).toEqual([1, 3])
  expect(within([], [])).toEqual([])
})

test('a chosen range is cut to the axis', () => {
  expect(rangeOf(made([0, 4]), [1, 9])).toEqual([1, 4])
  expect(rangeOf(made([0, 4]), undefined)).toEqual([0, 4])
})

test('ranges are conditions of the table of trials where it has such ones', () => {
  const of = (axis: Axis, low: number, high: number) => conditions(axis, [low, high])
  const log = made([0.001, 0.002, 10], 'parameter.k')
  expect(of(log, -2, 1)).toEqual(['parameter.k>=0.01'])
  expect(of(made([0, 4], 'value.math'), 1, 2)).toEqual(['value.math>=1', 'value.math<=2'])
  expect(of(made([0, 4]), 0, 4)).toEqual([])
  expect(of(made(['a', 'b', 'c']), 1, 1)).toEqual(['parameter.p=b'])
  expect(of(made(['a', 'b', 'c']), 1, 2)).toBeUndefined()
  expect(of(made([0.5, 1, null]), made([0.5, 1, null]).extent[0], 0.7)).toBeUndefined()
})

test('a bound that may have been rounded keeps the trials at it', () => {
  const axis = axisOf('value.math', [0.1, 0.666667, 0.9])!
  const found = conditions(axis, [0.666667, 0.9])![0]!
  expect(Number(found.replace('value.math>=', ''))).toBeLessThan(2 / 3)
})
