/** Points with intervals, drawn by ECharts' custom series. */

/** What ECharts gives to a custom series' `renderItem`. */
export interface Drawing {
  coord: (at: number[]) => number[]
  value: (dimension: number) => number
  visual: (name: string) => string
}

const line = (from: readonly number[], to: readonly number[], stroke: string) => ({
  type: 'line',
  shape: { x1: from[0], y1: from[1], x2: to[0], y2: to[1] },
  style: { stroke, lineWidth: 2 },
})

/** A point [x, y, low, high] with its interval along one axis; without a radius the interval alone. */
export const drawInterval =
  (along: 'x' | 'y', r = 4) =>
  (_: unknown, item: Drawing): object => {
    const [x, y, low, high] = [0, 1, 2, 3].map((k) => item.value(k)) as [number, number, number, number]
    const end = (at: number) => item.coord(along === 'x' ? [at, y] : [x, at])
    const fill = item.visual('color')
    const [cx, cy] = item.coord([x, y])
    return {
      type: 'group',
      children: [
        line(end(low), end(high), fill),
        ...(r > 0 ? [{ type: 'circle', shape: { cx, cy, r }, style: { fill } }] : []),
      ],
    }
  }

/** A cross-hair [x, y, trial, left, right, bottom, top]: the intervals of a point along both axes. */
export const drawCross = (_: unknown, item: Drawing): object => {
  const [x, y, , left, right, bottom, top] = [0, 1, 2, 3, 4, 5, 6].map((k) => item.value(k)) as number[]
  const stroke = item.visual('color')
  return {
    type: 'group',
    children: [
      line(item.coord([left!, y!]), item.coord([right!, y!]), stroke),
      line(item.coord([x!, bottom!]), item.coord([x!, top!]), stroke),
    ],
  }
}
