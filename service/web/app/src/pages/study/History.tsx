import { useNavigate } from '@tanstack/react-router'
import { useCallback, useMemo, useState } from 'react'
import type { Columns, FrontSeries, Objective, Study } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { useHold } from '../../charts/useHold'
import type { Selection } from '../../charts/ranges'
import { type Palette, axis, paleSeries } from '../../charts/palette'
import { count, value } from '../../format'
import { drawInterval } from '../../charts/intervals'
import { escaped } from '../../charts/escaped'
import { ChooseObjective } from '../../parts/Choose'
import { type Row, grouped, rowsOf, text } from './historyRows'
import { inRanges } from './Selected'

const MEAN = 'mean'

/** Number of the trials that have values. */
const numScored = ({ trials }: { trials: Columns }) => trials.samples!.filter((samples) => samples != null).length

/** Objectives whose plain mean says something: values in [0, 1] of which the larger is better. */
function averaged(objectives: readonly Objective[]): string[] {
  const isShare = ({ direction, range = [0, 1] }: Objective) =>
    direction === 'maximize' && range[0] === 0 && range[1] === 1
  return objectives.filter(isShare).map((each) => each.name)
}

/**
 * Every trial at the highest rung that it has finished, and the best so far at full budget: of the trials of `front`,
 * which may come later. Trials that are not in the `selection` are pale.
 */
export function History(props: {
  study: Study
  trials: Columns
  front: FrontSeries['points'] | undefined
  selection: Selection | undefined
}) {
  const { study } = props
  const latest = useMemo(
    () => ({ trials: props.trials, front: props.front, selection: props.selection }),
    [props.trials, props.front, props.selection],
  )
  const key = JSON.stringify([props.selection?.words, props.front === undefined])
  const [{ trials, front, selection }, hold] = useHold(latest, { key, count: numScored })
  const { objectives } = study
  const navigate = useNavigate()
  const means = useMemo(() => averaged(objectives), [objectives])
  const choices = [...(means.length > 1 ? [MEAN] : []), ...objectives.map((each) => each.name)]
  const [chosen, setChosen] = useState<string>()
  const name = chosen ?? choices[0]!
  const isLess = objectives.find((each) => each.name === name)?.direction === 'minimize'
  const rows = useMemo(() => rowsOf(trials, front, name === MEAN ? means : [name]), [trials, front, means, name])
  const record = useMemo(() => {
    const found: Row[] = []
    for (const row of rows) {
      const best = found.at(-1)
      if (row.isFull && row.isFeasible && (!best || (isLess ? row.value < best.value : row.value > best.value)))
        found.push(row)
    }
    return found
  }, [rows, isLess])
  const rungs = useMemo(() => [...new Set(rows.map((row) => row.rung))].toSorted((a, b) => a - b), [rows])
  const groups = useMemo(() => grouped(rows, rungs, selection?.trials), [rows, rungs, selection])
  const option = useCallback(
    (p: Palette) => {
      const shades = [p.pale, p.middle, p.accent]
      const shade = (k: number) => shades[Math.max(0, shades.length - rungs.length + k)] ?? p.pale
      const point = (row: Row) => [row.trial, row.value, row.trial]
      const line = record.map((row) => [row.trial, row.value, row.trial])
      const last = rows.at(-1)
      if (record.length && last) line.push([last.trial, record.at(-1)!.value, record.at(-1)!.trial])
      const [baselines, outside] = groups.slice(rungs.length) as [Row[], Row[]]
      const byTrial = new Map(rows.map((row) => [row.trial, row]))
      return {
        grid: { left: 52, right: 16, top: 12, bottom: 42 },
        tooltip: {
          trigger: 'item',
          confine: true,
          formatter: ({ data }: { data: number[] }) => text(byTrial.get(data[2]!), name, escaped),
        },
        xAxis: axis(p, 'trial', {
          type: 'value',
          splitLine: { show: false },
          minInterval: 1,
          scale: false,
          max: ({ max }: { max: number }) => max + Math.max(1, Math.round(max / 50)),
        }),
        yAxis: axis(p, name, { type: 'value', nameGap: 38 }),
        dataZoom: [{ type: 'inside', filterMode: 'none', zoomOnMouseWheel: 'ctrl' }],
        series: [
          ...rungs.map((rung, k) => ({
            type: 'scatter',
            name: `rung ${rung}`,
            large: true,
            largeThreshold: 1500,
            symbolSize: rows.length - outside.length > 500 ? 4 : 7,
            itemStyle: { color: shade(k) },
            data: groups[k]!.map(point),
          })),
          {
            type: 'scatter',
            name: 'baselines',
            symbolSize: 8,
            itemStyle: { color: 'transparent', borderColor: p.warm, borderWidth: 1.5 },
            data: baselines.map(point),
          },
          { ...paleSeries(p), name: 'outside the ranges', data: outside.map(point) },
          {
            type: 'line',
            name: 'best so far',
            step: 'end',
            symbol: 'none',
            silent: true,
            lineStyle: { color: p.ink, width: 1.5 },
            data: line,
          },
          {
            type: 'custom',
            name: 'intervals of the best so far',
            silent: true,
            itemStyle: { color: p.ink },
            encode: { x: 0, y: [1, 2, 3] },
            data: record.flatMap(({ trial, value: at, ends }) => (ends ? [[trial, at, ...ends]] : [])),
            renderItem: drawInterval('y', 0), // the points are there already
          },
        ],
      }
    },
    [rows, record, rungs, groups, name],
  )
  // The arrow keys step through the trials that were the best so far.
  const points = useMemo(() => {
    const places = new Map(groups.flatMap((group, series) => group.map((row, index) => [row, { series, index }])))
    return record.map((row) => ({ ...places.get(row)!, text: text(row, name), trial: row.trial }))
  }, [record, groups, name])
  const isShown = ({ isBaseline, trial }: Row) => isBaseline || selection === undefined || selection.trials.has(trial)
  const best = record.at(-1)
  const numFull = rows.filter((row) => row.isFull).length
  return (
    <>
      <ChooseObjective names={choices} value={name} onChange={setChosen} />
      <EChart
        label={`${name === MEAN ? 'Mean of the objectives' : name} of every trial`}
        describe={
          best
            ? `Best ${value(best.value)} at trial ${best.trial}; ${count(numFull)} of ${count(rows.length)} trials at full budget.${inRanges(selection)}`
            : `No trial has reached the full budget yet.${inRanges(selection)}`
        }
        option={option}
        hold={hold}
        points={points}
        onPick={(trial) =>
          navigate({ to: '/studies/$id/trials/$number', params: { id: study.id, number: `${trial}` } })
        }
        table={() => ({
          head: ['trial', 'label', name, 'standard error', 'samples', 'full budget'],
          rows: rows
            .filter(isShown)
            .map((row) => [
              row.trial,
              row.label,
              value(row.value),
              value(row.error),
              count(row.samples),
              row.isFull ? 'yes' : 'no',
            ]),
        })}
      />
      <p className="soft">
        A darker point was scored on more samples. Values on different numbers of samples are not comparable; the line
        is the best at full budget, with the 95 % interval of each best trial; in that of the mean, the errors of the
        objectives count as independent. Orange rings are baselines: sources and published recipes. Values are on the
        samples of the search, which overestimate the best trial; <a href="#held-out">held-out values</a> do not.
      </p>
    </>
  )
}
