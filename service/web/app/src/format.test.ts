import { expect, test } from 'vitest'
import { bytes, count, duration, interval, mark, ownLabel, parameterValue, signed, value, withMinuses } from './format'

test('metrics have three decimals and a real minus', () => {
  expect(value(0.79849)).toBe('0.798')
  expect(value(-1.5)).toBe('−1.500')
  expect(value(null)).toBe('')
  expect(signed(-0.0361)).toBe('−0.036')
  expect(signed(0.001)).toBe('+0.001')
  expect(interval(0.7836, 0.8114)).toBe('0.784 to 0.811')
})

test('counts have separators, durations two units', () => {
  expect(count(10009)).toBe('10,009')
  expect(duration(59.6)).toBe('1m00s')
  expect(duration(290)).toBe('4m50s')
  expect(duration(3900)).toBe('1h05m')
  expect(bytes(15_200_000_000)).toBe('15.2 GB')
})

test('parameters are shown by their types, and missing ones as nothing', () => {
  const shown = [3, 0.123456, 'base', true, [1, 2], undefined].map(parameterValue)
  expect(shown).toEqual(['3', '0.123', 'base', 'true', '[1,2]', ''])
  const small = [0.000286123, -0.0123456, 0.05, 2.5e-8, -2].map(parameterValue)
  expect(small).toEqual(['0.000286', '−0.0123', '0.05', '2.5e−8', '−2'])
})

test('marks of axes have all digits, separators and a real minus', () => {
  expect([-0.0005, 12500, 0.1 + 0.2, 1e-7].map(mark)).toEqual(['−0.0005', '12,500', '0.3', '0.0000001'])
})

test('hyphens before numbers in sentences become minuses, those in names do not', () => {
  expect(withMinuses('task_arithmetic-1 (interval -0.089 to 0.161), llama-3 at 1e-5')).toBe(
    'task_arithmetic-1 (interval −0.089 to 0.161), llama-3 at 1e-5',
  )
})

test('a label that repeats the number of a trial is left out', () => {
  expect([ownLabel(5, 'trial 5'), ownLabel(6, 'trial 5'), ownLabel(0, 'base')]).toEqual(['', 'trial 5', 'base'])
})
