import { useQuery } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { useCallback, useMemo } from 'react'
import { columns as columnsQuery } from '../../api/queries'
import type { Columns } from '../../api/types'
import { type Axis, axisOf } from '../../charts/axes'
import { escaped } from '../../charts/escaped'
import { EChart } from '../../charts/EChart'
import { useHold } from '../../charts/useHold'
import { type Palette, axis } from '../../charts/palette'
import { count, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { parametersRoute } from '../../router'
import { useStudy } from './StudyLayout'

/** One parameter of all proposed trials against one objective. */
export function Slice({ objective, parameters }: { objective: string; parameters: string[] }) {
  const { study } = useStudy()
  const against = parametersRoute.useSearch({ select: (search) => search.against })
  const navigate = parametersRoute.useNavigate()
  const parameter = against ?? parameters[0]!
  const fields = `number,samples,value.${objective},parameter.${parameter}`
  const trials = useQuery({ ...columnsQuery(study.id, fields), placeholderData: (old) => old })
  return (
    <section aria-labelledby="slice">
      <h2 id="slice">One parameter</h2>
      <div className="row">
        <Choose
          label="Parameter"
          options={parameters.includes(parameter) ? parameters : [parameter, ...parameters]}
          value={parameter}
          onChange={(chosen) => navigate({ search: (old) => ({ ...old, against: chosen }), replace: true })}
        />
      </div>
      <Answer of={trials}>
        {({ columns }) => (
          <Chart {...{ objective, parameter, columns }} choice={`${fields} ${trials.isPlaceholderData}`} />
        )}
      </Answer>
    </section>
  )
}

const numScored = ({ samples }: Columns) => samples!.filter((each) => each != null).length

interface Point {
  trial: number
  at: number
  value: number
  samples: number
}

function pointsOf(columns: Columns, objective: string, own: Axis): Point[] {
  return columns.number!.flatMap((trial, k) => {
    const found = columns[`value.${objective}`]?.[k] as number | null | undefined
    const at = own.positions[k]!
    return found == null || at < own.lowest
      ? []
      : [{ trial: trial as number, at, value: found, samples: columns.samples![k] as number }]
  })
}

/** `choice` is another one where the columns are, or become, those of another parameter or objective. */
function Chart(props: { objective: string; parameter: string; columns: Columns; choice: string }) {
  const { objective, parameter, choice } = props
  const { study } = useStudy()
  const [columns, hold] = useHold(props.columns, { key: choice, count: numScored })
  const navigate = useNavigate()
  const own = useMemo(() => axisOf(parameter, columns[`parameter.${parameter}`] ?? []), [columns, parameter])
  const points = useMemo(() => (own ? pointsOf(columns, objective, own) : []), [columns, objective, own])
  const most = points.reduce((top, point) => Math.max(top, point.samples), 0)
  const say = useCallback(
    (point: Point, safe = (text: string) => text) =>
      `trial ${point.trial}: ${safe(objective)} ${value(point.value)} on ${count(point.samples)} samples, ${safe(parameter)} ${safe(own?.text(point.at) ?? '')}`,
    [objective, parameter, own],
  )
  const option = useCallback(
    (p: Palette) => {
      const categories = own!.marks.filter((at) => at >= own!.lowest).map(own!.value)
      const label = { color: p.soft, hideOverlap: true, formatter: (at: number) => own!.value(at) }
      const scale =
        own!.kind === 'category' ? { type: 'category', data: categories } : { type: 'value', axisLabel: label }
      const series = (isFull: boolean) => ({
        type: 'scatter',
        large: true,
        largeThreshold: 1500,
        symbolSize: points.length > 500 ? 4 : 7,
        itemStyle: { color: isFull ? p.accent : p.pale },
        data: points
          .filter((point) => (point.samples === most) === isFull)
          .map((point) => [point.at, point.value, point.trial]),
      })
      const byTrial = new Map(points.map((point) => [point.trial, point]))
      return {
        grid: { left: 52, right: 16, top: 12, bottom: 42 },
        tooltip: {
          trigger: 'item',
          confine: true,
          formatter: ({ data }: { data: number[] }) => say(byTrial.get(data[2]!)!, escaped),
        },
        xAxis: axis(p, parameter, { ...scale, splitLine: { show: false } }),
        yAxis: axis(p, objective, { nameGap: 38 }),
        series: [series(false), series(true)],
      }
    },
    [points, most, objective, parameter, own, say],
  )
  // The arrow keys step through the trials with most samples, in the order of the parameter.
  const stops = useMemo(() => {
    const full = points.filter((point) => point.samples === most)
    return full
      .map((point, index) => ({ series: 1, index, text: say(point), trial: point.trial, at: point.at }))
      .toSorted((a, b) => a.at - b.at)
  }, [points, most, say])
  if (own === undefined || points.length === 0)
    return <Nothing>All trials have the same value of {parameter}, or none has finished a rung with it.</Nothing>
  return (
    <>
      <EChart
        label={`${objective} against ${parameter}`}
        describe={`${count(points.length)} trials, ${count(stops.length)} of them on the most samples.`}
        option={option}
        hold={hold}
        points={stops}
        onPick={(trial) =>
          navigate({ to: '/studies/$id/trials/$number', params: { id: study.id, number: `${trial}` } })
        }
        table={() => ({
          head: ['trial', parameter, objective, 'samples'],
          rows: points.map((point) => [point.trial, own.text(point.at), value(point.value), count(point.samples)]),
        })}
      />
      <p className="soft">Darker points were scored on {count(most)} samples, pale ones on fewer.</p>
    </>
  )
}
