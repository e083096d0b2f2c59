import { Button, Checkbox, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useMemo, useState } from 'react'
import { api } from '../../api/client'
import { columns as columnsQuery, parameterNames, pareto } from '../../api/queries'
import type { components } from '../../api/schema'
import type { Columns, Objective } from '../../api/types'
import { axesOf, conditions, rangeOf, within } from '../../charts/axes'
import { Parallel, type Ranges } from '../../charts/Parallel'
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
  const search = parametersRoute.useSearch()
  const navigate = parametersRoute.useNavigate()
  const all = objectives.map(({ name }) => name)
  const objective = all.find((name) => name === search.objective) ?? all[0]!
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

/** Columns that may be axes: samples, objectives, and parameters. */
function Coordinates(props: {
  objectives: string[]
  parameters: string[]
  important: Importances | undefined
  isWaiting: boolean
}) {
  const { objectives, important, isWaiting } = props
  const { study } = useStudy()
  const { axes: asked } = parametersRoute.useSearch()
  const parameters = useMemo(() => ordered(props.parameters, important), [props.parameters, important])
  const values = useMemo(() => ['samples', ...objectives.map((name) => `value.${name}`)], [objectives])
  const chosen = useMemo(() => {
    if (asked !== undefined) return asked.split(',').slice(0, MAX_AXES)
    return [...values, ...parameters.slice(0, DEFAULT_PARAMETERS).map((name) => `parameter.${name}`)].slice(0, MAX_AXES)
  }, [asked, values, parameters])
  const fields = ['number', 'origin', ...new Set([...values, ...chosen])].join(',')
  const trials = useQuery({ ...columnsQuery(study.id, fields), placeholderData: (old) => old })
  return (
    <section aria-labelledby="coordinates">
      <h2 id="coordinates">Parallel coordinates</h2>
      <ChooseAxes chosen={chosen} values={values} parameters={parameters.map((name) => `parameter.${name}`)} />
      {asked === undefined && isWaiting && (
        <p className="soft">
          The axes are the first parameters that differ between trials until their importance is computed.
        </p>
      )}
      <Answer of={trials}>{(found) => <Filtered columns={found.columns} chosen={chosen} values={values} />}</Answer>
    </section>
  )
}

// Conditions of the table of trials for the same trials.
const SCORED = 'rung>=0'

/** Proposed trials that have finished a rung. */
function scored(columns: Columns): Columns {
  const rows = columns.number!.flatMap((_, k) =>
    columns.samples![k] != null && columns.origin![k] === 'search' ? [k] : [],
  )
  return Object.fromEntries(Object.entries(columns).map(([name, all]) => [name, rows.map((k) => all[k]!)]))
}

function Filtered({ columns, chosen, values }: { columns: Columns; chosen: string[]; values: string[] }) {
  const { study } = useStudy()
  const [ranges, setRanges] = useState<Ranges>({})
  const rows = useMemo(() => scored(columns), [columns])
  const { axes, constant } = useMemo(() => axesOf(rows, chosen), [rows, chosen])
  const own = useMemo(() => axes.map((axis) => rangeOf(axis, ranges[axis.column])), [axes, ranges])
  const kept = useMemo(() => within(axes, own), [axes, own])
  const total = rows.number!.length
  if (total === 0) return <Nothing>No proposed trial has finished a rung yet.</Nothing>
  if (axes.length < 2) return <Nothing>Fewer than two of the chosen axes differ between trials.</Nothing>
  const where = axes.map((axis, k) => conditions(axis, own[k]!))
  const isExact = where.every((each) => each !== undefined)
  return (
    <>
      <Parallel axes={axes} ranges={ranges} onFilter={setRanges} />
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
        {Object.keys(ranges).length > 0 && (
          <Button size="xs" variant="default" onClick={() => setRanges({})}>
            Reset the ranges
          </Button>
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
  const choose = (axes: string[] | undefined) =>
    navigate({ search: (old) => ({ ...old, axes: axes?.join(',') }), replace: true })
  const toggle = (column: string) => {
    const all = [...values, ...parameters]
    const wanted = new Set(chosen.includes(column) ? chosen.filter((each) => each !== column) : [...chosen, column])
    choose(all.filter((each) => wanted.has(each)))
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
            <Button size="xs" variant="default" onClick={() => choose(undefined)}>
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
