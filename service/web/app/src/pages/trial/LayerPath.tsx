import { useCallback, useMemo } from 'react'
import type { PathPlot } from '../../api/types'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { type Palette } from '../../charts/palette'
import { value } from '../../format'

type Step = PathPlot['steps'][number]

const MERGED = 'merged'
const CELL_PX = 28
// Distance of a scale from 1 that has the full colour, if no scale is further away.
const FAR = 0.5

/** The layer path: which layer of which model is at each position of the merged model, coloured by its scale. */
export function LayerPath({ plot }: { plot: PathPlot }) {
  const { steps, models } = plot
  const rows = useMemo(
    () => [...models, ...(steps.some((step) => step.model === null) ? [MERGED] : [])],
    [models, steps],
  )
  const far = useMemo(() => Math.max(FAR, ...steps.map((step) => Math.abs(scaleOf(step) - 1))), [steps])
  const hasScales = steps.some((step) => scaleOf(step) !== 1)
  const option = useCallback(
    (p: Palette) => {
      const category = { type: 'category', axisTick: { show: false }, axisLine: { lineStyle: { color: p.rule } } }
      return {
        grid: { left: 100, right: 8, top: 6, bottom: 42 },
        tooltip: {
          confine: true,
          formatter: ({ dataIndex }: { dataIndex: number }) => escaped(say(steps[dataIndex]!)),
        },
        xAxis: {
          ...category,
          name: 'position in the merged model',
          nameLocation: 'middle',
          nameGap: 24,
          nameTextStyle: { color: p.soft },
          axisLabel: { color: p.soft },
          data: steps.map((step) => step.position),
        },
        yAxis: {
          ...category,
          data: rows,
          inverse: true,
          axisLabel: { color: p.soft, width: 90, overflow: 'truncate' },
        },
        visualMap: { show: false, dimension: 2, min: 1 - far, max: 1 + far, inRange: { color: [...p.diverging] } },
        series: [
          {
            type: 'heatmap',
            itemStyle: { borderColor: p.soft, borderWidth: 1 },
            label: {
              show: true,
              color: p.ink,
              formatter: ({ dataIndex }: { dataIndex: number }) => `${steps[dataIndex]!.layer ?? ''}`,
            },
            data: steps.map((step, k) => [k, rows.indexOf(step.model ?? MERGED), scaleOf(step)]),
          },
        ],
      }
    },
    [steps, rows, far],
  )
  const points = useMemo(() => steps.map((step, index) => ({ series: 0, index, text: say(step) })), [steps])
  const moved = steps.filter((step) => step.model !== null && step.layer !== step.position).length
  return (
    <section aria-labelledby="path">
      <h2 id="path">Layer path</h2>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Layers of the merged model">
        <div style={{ minWidth: 120 + CELL_PX * steps.length }}>
          <EChart
            label={`Layers of the merged model${hasScales ? ', coloured by the factor of their output' : ''}`}
            describe={`${steps.length} layers; ${moved} are not at the position that they have in their model.`}
            option={option}
            points={points}
            height={54 + CELL_PX * rows.length}
            table={() => ({
              head: ['position', 'model', 'layer', 'scale', 'scale of the MLP', 'scale of the weights'],
              rows: steps.map((step) => [
                step.position,
                step.model ?? MERGED,
                step.layer ?? '',
                value(step.scale),
                value(step.mlp_scale),
                value(step.weights),
              ]),
            })}
          />
        </div>
      </div>
    </section>
  )
}

/** The factor that colours a step: of the layer's output or, where that is 1, of its MLP's output or its weights. */
const scaleOf = (step: Step) => [step.scale, step.mlp_scale, step.weights].find((scale) => scale !== 1) ?? 1

function say(step: Step): string {
  const parts = [
    `position ${step.position}: ${step.model ?? MERGED}${step.layer === null ? '' : `, layer ${step.layer}`}`,
    step.scale !== 1 && `output times ${value(step.scale)}`,
    step.mlp_scale !== 1 && `MLP times ${value(step.mlp_scale)}`,
    step.weights !== 1 && `weights times ${value(step.weights)}`,
  ]
  return parts.filter(Boolean).join(', ')
}
