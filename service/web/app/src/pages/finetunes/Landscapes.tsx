import { useCallback, useMemo } from 'react'
import type { Analysis } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { escaped } from '../../charts/escaped'
import { type Palette, axis } from '../../charts/palette'
import { value } from '../../format'

type Fleet = Analysis['fleets'][number]
type Landscape = NonNullable<Fleet['landscape']>

/** Summed losses of merges of two experts, over the coefficients of their task vectors. */
export function Landscapes({ analysis }: { analysis: Analysis }) {
  const shown = analysis.fleets.flatMap((fleet) =>
    landscapesOf(fleet).map((landscape) => {
      const pair = landscape.experts.join(' and ')
      return { landscape, label: analysis.fleets.length > 1 ? `${pair}, ${fleet.name}` : pair }
    }),
  )
  const range = useMemo(() => {
    const losses = analysis.fleets.flatMap(landscapesOf).flatMap((each) => each.losses.flat())
    const finite = losses.filter((loss) => loss !== null)
    return { low: Math.min(...finite), high: Math.max(...finite) }
  }, [analysis])
  if (shown.length === 0) return null
  return (
    <section aria-labelledby="landscape">
      <h3 id="landscape">Joint loss</h3>
      <p className="soft">
        The sum of two experts&apos; losses by the coefficients of their task vectors, in nats per token. All charts
        have the same colours.
      </p>
      <div className="halves">
        {shown.map(({ landscape, label }) => (
          <HeatMap key={label} landscape={landscape} label={label} range={range} />
        ))}
      </div>
    </section>
  )
}

function landscapesOf({ landscapes, landscape }: Fleet): Landscape[] {
  return landscapes ?? (landscape === null ? [] : [landscape])
}

function HeatMap(props: { landscape: Landscape; label: string; range: { low: number; high: number } }) {
  const { landscape, label, range } = props
  const [first, second] = landscape.experts as [string, string]
  const cells = useMemo(
    () => landscape.losses.flatMap((row, i) => row.map((loss, j) => [j, i, loss] as const)),
    [landscape],
  )
  const option = useCallback(
    (p: Palette) => {
      const names = landscape.coefficients.map((x) => `${Number(x.toFixed(3))}`)
      const category = { type: 'category', data: names, scale: false, axisTick: { show: false } }
      return {
        grid: { left: 60, right: 16, top: 8, bottom: 90 },
        tooltip: {
          confine: true,
          formatter: ({ data: [j, i, loss] }: { data: [number, number, number] }) =>
            `${escaped(first)} ${names[i]}, ${escaped(second)} ${names[j]}: ${value(loss)}`,
        },
        xAxis: axis(p, `coefficient of ${second}`, category),
        yAxis: axis(p, `coefficient of ${first}`, { ...category, nameGap: 42 }),
        visualMap: {
          min: range.low,
          max: range.high,
          dimension: 2,
          calculable: false,
          orient: 'horizontal',
          left: 'center',
          bottom: 0,
          itemHeight: 120,
          precision: 2,
          text: [value(range.high), value(range.low)],
          textStyle: { color: p.soft },
          inRange: { color: [p.accent, p.pale, p.warm] },
        },
        series: [
          {
            type: 'heatmap',
            data: cells.filter(([, , loss]) => loss !== null),
            itemStyle: { borderWidth: 1, borderColor: p.paper },
          },
        ],
      }
    },
    [landscape, first, second, range, cells],
  )
  const best = cells.reduce<readonly [number, number, number] | undefined>(
    (least, [j, i, loss]) => (loss !== null && (least === undefined || loss < least[2]) ? [j, i, loss] : least),
    undefined,
  )
  const at = (k: number) => Number(landscape.coefficients[k]!.toFixed(3))
  return (
    <EChart
      label={label}
      describe={best ? `Least: ${value(best[2])} at ${first} ${at(best[1])}, ${second} ${at(best[0])}.` : ''}
      option={option}
      height={360}
      table={() => ({
        head: [`${first} \\ ${second}`, ...landscape.coefficients.map((_, j) => `${at(j)}`)],
        rows: landscape.losses.map((row, i) => [
          at(i),
          ...row.map((loss) => (loss === null ? 'not finite' : value(loss))),
        ]),
      })}
    />
  )
}
