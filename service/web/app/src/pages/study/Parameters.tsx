import { Button, Checkbox, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useCallback, useMemo, useState } from 'react'
import { api } from '../../api/client'
import { columns as columnsQuery, parameterNames, pareto } from '../../api/queries'
import type { components } from '../../api/schema'
import type { Columns, Objective } from '../../api/types'
import { axesOf, conditions, within } from '../../charts/axes'
import { Held } from '../../charts/Held'
import { Parallel } from '../../charts/Parallel'
import { asked, rangesOf, scored, without, written } from '../../charts/ranges'
import { useHold } from '../../charts/useHold'
import { count, value } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { ChooseObjective } from '../../parts/Choose'
import { parametersRoute } from '../../router'
import { Importance } from './Importance'
import { Slice } from './Slice'
import { useStudy } from './StudyLayout'

type Importances = components['schemas']['ImportancePlot']

// Parameters that are axes by default: the most important ones.
const DEFAULT_PARAMETERS = 8
const MAX_AXES = 16

// Kept trials that are listed.
const LISTED = 50

const importance = (id: string, objective: string) => ({
  queryKey: ['study', id, 'plots', 'importance', objective],
  queryFn: async ({ signal }: { signal: AbortSignal }) => {
    const params = { path: { study_id: id }, query: { objective } }
    return (await api.GET('/v1/studies/{study_id}/plots/importance', { params, signal })).data!
  },
  staleTime: 60_000,
})

/** Parallel coordinates of objectives and parameters, the importance of parameters, and one against an objective. */
export function Parameters() {
  const { study } = useStudy()
  const objectives = useQuery(pareto(study.id))
  const parameters = useQuery(parameterNames(study.id))
  return (
    <Answer of={objectives}>
      {(front) => (
        <Answer of={parameters}>
          {({ variedFirst }) =>
            variedFirst.length === 0 ? (
              <Nothing>No proposed trial has parameters yet.</Nothing>
            ) : (
              <OfObjective objectives={front.objectives} parameters={variedFirst} />
            )
          }
        </Answer>
      )}
    </Answer>
  )
}

/** `parameters` are names of the search space, of which those that differ between trials are first. */
function OfObjective({ objectives, parameters }: { objectives: Objective[]; parameters: string[] }) {
  const { study } = useStudy()
  const wanted = parametersRoute.useSearch({ select: (search) => search.objective })
  const navigate = parametersRoute.useNavigate()
  const all = objectives.map(({ name }) => name)
  const objective = all.find((name) => name === wanted) ?? all[0]!
  const important = useQuery(importance(study.id, objective))
  return (
    <>
      <ChooseObjective
        names={all}
        value={objective}
        onChange={(name) => navigate({ search: (old) => ({ ...old, objective: name }), replace: true })}
      />
      <Coordinates
        objectives={all}
        parameters={parameters}
        important={important.data}
        isWaiting={important.isPending}
      />
      <section aria-labelledby="importance">
        <h2 id="importance">Importance for {objective}</h2>
        <Answer of={important}>{(plot) => <Importance plot={plot} />}</Answer>
      </section>
      <Slice objective={objective} parameters={ordered(parameters, important.data)} />
    </>
  )
}

/** The parameters, the most important ones first. */
function ordered(parameters: string[], important: Importances | undefined): string[] {
  const first = important?.parameters?.map(({ name }) => name) ?? []
  return [...new Set([...first, ...parameters])]
}

/**
 * The ranges of the address, and a function that changes them. Sliders have what it was given at once; the address has
 * it once the router is done.
 */
function useRanges(): [string | undefined, (ranges: string | undefined) => void] {
  const inAddress = parametersRoute.useSearch({ select: (search) => search.ranges })
  const navigate = parametersRoute.useNavigate()
  const [{ before, now }, set] = useState({ before: inAddress, now: inAddress })
  if (before !== inAddress) set({ before: inAddress, now: inAddress })
  const change = useCallback(
    (ranges: string | undefined) => {
      set((old) => ({ ...old, now: ranges }))
      navigate({ search: (old) => ({ ...old, ranges }), replace: true })
    },
    [navigate],
  )
  return [now, change]
}

/** Columns that may be axes: samples, objectives, and parameters. */
function Coordinates(props: {
  objectives: string[]
  parameters: string[]
  important: Importances | undefined
  isWaiting: boolean
}) {
  const { objectives, important, isWaiting } = props
  const { study } = useStudy()
  const wanted = parametersRoute.useSearch({ select: (search) => search.axes })
  const [ranges, setRanges] = useRanges()
  const parameters = useMemo(() => ordered(props.parameters, important), [props.parameters, important])
  const values = useMemo(() => ['samples', ...objectives.map((name) => `value.${name}`)], [objectives])
  const usual = useMemo(() => {
    if (wanted !== undefined) return wanted.split(',').slice(0, MAX_AXES)
    return [...values, ...parameters.slice(0, DEFAULT_PARAMETERS).map((name) => `parameter.${name}`)].slice(0, MAX_AXES)
  }, [wanted, values, parameters])
  // A range is never without its axis.
  const further = [...asked(ranges).keys()].filter((column) => !usual.includes(column)).join(',')
  const chosen = useMemo(() => (further ? [...usual, ...further.split(',')] : usual), [usual, further])
  const fields = ['number', 'origin', ...new Set([...values, ...chosen])].join(',')
  const trials = useQuery({ ...columnsQuery(study.id, fields), placeholderData: (old) => old })
  return (
    <section aria-labelledby="coordinates">
      <h2 id="coordinates">Parallel coordinates</h2>
      <ChooseAxes chosen={chosen} values={values} parameters={parameters.map((name) => `parameter.${name}`)} />
      {wanted === undefined && isWaiting && (
        <p className="soft">
          The axes are the first parameters that differ between trials until their importance is computed.
        </p>
      )}
      <Answer of={trials}>
        {(found) => (
          <Filtered
            columns={found.columns}
            choice={`${fields} ${trials.isPlaceholderData}`}
            {...{ chosen, values, ranges, setRanges }}
          />
        )}
      </Answer>
    </section>
  )
}

const numScored = (columns: Columns) => scored(columns).number!.length

// Conditions of the table of trials for the same trials.
const SCORED = 'rung>=0'

/** `choice` is another one where the columns are, or become, those of other axes. */
function Filtered(props: {
  columns: Columns
  choice: string
  chosen: string[]
  values: string[]
  ranges: string | undefined
  setRanges: (ranges: string | undefined) => void
}) {
  const { choice, chosen, values, ranges, setRanges } = props
  const { study } = useStudy()
  const [columns, hold] = useHold(props.columns, { key: choice, count: numScored })
  const rows = useMemo(() => scored(columns), [columns])
  const { axes, constant } = useMemo(() => axesOf(rows, chosen), [rows, chosen])
  const placed = useMemo(() => rangesOf(axes, asked(ranges)), [axes, ranges])
  const own = useMemo(() => axes.map((axis) => placed[axis.column] ?? axis.extent), [axes, placed])
  const kept = useMemo(() => within(axes, own), [axes, own])
  const total = rows.number!.length
  if (total === 0) return <Nothing>No proposed trial has finished a rung yet.</Nothing>
  if (axes.length < 2) return <Nothing>Fewer than two of the chosen axes differ between trials.</Nothing>
  const where = axes.map((axis, k) => conditions(axis, own[k]!))
  const isExact = where.every((each) => each !== undefined)
  return (
    <>
      <Held hold={hold}>
        <Parallel axes={axes} ranges={placed} onFilter={(all) => setRanges(written(axes, all))} />
      </Held>
      {constant.length > 0 && (
        <p className="soft">Left out, because all trials have the same value: {constant.map(short).join(', ')}.</p>
      )}
      <div className="row">
        <p role="status">
          {count(kept.length)} of {count(total)} trials are within all ranges
        </p>
        <Link
          to="/studies/$id/trials"
          params={{ id: study.id }}
          search={{ origin: 'search', where: [SCORED, ...(isExact ? where.flat() : [])].join(',') }}
        >
          {isExact ? 'These trials in the table' : 'Table of trials'}
        </Link>
        {ranges !== undefined && (
          <>
            <Link to="/studies/$id" params={{ id: study.id }} search={{ ranges }}>
              These trials in the history and the front
            </Link>
            <Button size="xs" variant="default" onClick={() => setRanges(undefined)}>
              Reset the ranges
            </Button>
          </>
        )}
      </div>
      <p className="soft">
        Values are those of the highest rung that a trial has finished; those on different numbers of samples are not
        comparable. An axis is logarithmic if its values span three decades and half of them are below a tenth of the
        largest; &ldquo;none&rdquo; are trials without the parameter.
      </p>
      <Kept rows={rows} kept={kept} values={values} />
    </>
  )
}

const short = (column: string) => column.replace(/^(parameter|value)\./, '')

function Kept({ rows, kept, values }: { rows: Columns; kept: number[]; values: string[] }) {
  const { study } = useStudy()
  if (kept.length === 0) return null
  return (
    <details>
      <summary>{kept.length > LISTED ? `The first ${LISTED} of these trials` : 'These trials'}</summary>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Kept trials">
        <table className="data">
          <thead>
            <tr>
              <th scope="col">trial</th>
              {values.map((column) => (
                <th key={column} scope="col">
                  {short(column)}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {kept.slice(0, LISTED).map((k) => (
              <tr key={k}>
                <th scope="row">
                  <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${rows.number![k]}` }}>
                    {rows.number![k]}
                  </Link>
                </th>
                {values.map((column) => (
                  <td key={column}>
                    {column === 'samples' ? count(rows[column]![k] as number) : value(rows[column]?.[k] as number)}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  )
}

/** Which columns are axes; the choice is in the address. */
function ChooseAxes({ chosen, values, parameters }: { chosen: string[]; values: string[]; parameters: string[] }) {
  const navigate = parametersRoute.useNavigate()
  const [isOpen, setIsOpen] = useState(false)
  const [text, setText] = useState('')
  const toggle = (column: string) => {
    const all = [...values, ...parameters]
    const wanted = new Set(chosen.includes(column) ? chosen.filter((each) => each !== column) : [...chosen, column])
    const axes = all.filter((each) => wanted.has(each)).join(',')
    // An axis that is taken away takes its range along.
    navigate({ search: (old) => ({ ...old, axes, ranges: without(old.ranges, column) }), replace: true })
  }
  const shown = [...values, ...parameters].filter((column) => column.toLowerCase().includes(text.toLowerCase()))
  return (
    <details onToggle={(event) => setIsOpen(event.currentTarget.open)} style={{ marginBottom: 10 }}>
      <summary className="soft">Choose the axes</summary>
      {isOpen && (
        <>
          <div className="row" style={{ margin: '8px 0' }}>
            <TextInput
              aria-label="Search the axes"
              placeholder="Search"
              value={text}
              onChange={(event) => setText(event.currentTarget.value)}
            />
            <Button
              size="xs"
              variant="default"
              onClick={() => navigate({ search: (old) => ({ ...old, axes: undefined }), replace: true })}
            >
              Objectives and most important parameters
            </Button>
            <span className="soft">
              {chosen.length} of at most {MAX_AXES}
            </span>
          </div>
          <fieldset className="choices">
            <legend className="soft">Axes</legend>
            {shown.map((column) => (
              <Checkbox
                key={column}
                size="xs"
                label={short(column)}
                checked={chosen.includes(column)}
                disabled={chosen.length >= MAX_AXES && !chosen.includes(column)}
                onChange={() => toggle(column)}
              />
            ))}
          </fieldset>
        </>
      )}
    </details>
  )
}
