import { expect, test } from 'vitest'
import { lossLines, nameOf, valueLines } from './lines'

const points = (...losses: number[]) => losses.map((loss, k) => ({ step: k + 1, loss }))

test('losses are called by where they are measured', () => {
  const lines = lossLines([
    { expert: 'a', loss: points(3, 2), loss_at: 'offset', weights_loss: points(1), offset_loss: [] },
    { expert: 'b', loss: points(4), loss_at: 'weights', weights_loss: [], offset_loss: points(5) },
    { expert: 'c', loss: points(6), loss_at: 'weights', weights_loss: [], offset_loss: [] },
    { expert: 'd', loss: [], loss_at: 'offset', weights_loss: [], offset_loss: [] },
  ])
  expect(lines.map((line) => [nameOf(line), line.index, line.isSecond ?? false, line.points])).toEqual([
    [
      'a, at the offset',
      0,
      false,
      [
        [1, 3],
        [2, 2],
      ],
    ],
    ['a, at the weights', 0, true, [[1, 1]]],
    ['b', 1, false, [[1, 4]]],
    ['b, at the offset', 1, true, [[1, 5]]],
    ['c', 2, false, [[1, 6]]],
    ['d, at the offset', 3, false, []],
  ])
})

test('a linearized model has a line of its own, in the colour of its expert', () => {
  const lines = valueLines('acc', [
    { expert: 'a', evaluations: [{ step: 5, values: { acc: 0.5 } }] },
    { expert: 'b', evaluations: [{ step: 5, values: { acc: 0.25 }, linearized_values: { acc: 0.75 } }] },
  ])
  expect(lines.map((line) => [nameOf(line), line.index, line.isSecond ?? false, line.points])).toEqual([
    ['a', 0, false, [[5, 0.5]]],
    ['b', 1, false, [[5, 0.25]]],
    ['b, linearized', 1, true, [[5, 0.75]]],
  ])
})
