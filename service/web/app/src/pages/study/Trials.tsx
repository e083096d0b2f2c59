import { Button, TextInput } from '@mantine/core'
import { useMutation, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { type FormEvent, useState } from 'react'
import { api } from '../../api/client'
import { parameterNames } from '../../api/queries'
import { trialNumber } from '../../api/samples'
import type { Trial } from '../../api/types'
import { Failure } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { ColumnMenu } from '../../parts/ColumnMenu'
import { csv } from '../../parts/csv'
import { save } from '../../parts/Download'
import { Filter } from '../../parts/Filter'
import { type Column, type Page, VirtualTable } from '../../parts/VirtualTable'
import { trialsRoute } from '../../router'
import { useStudy } from './StudyLayout'
import { shownColumns, trialColumns } from './TrialColumns'

const STATES = ['WAITING', 'RUNNING', 'COMPLETE', 'PRUNED', 'FAIL'] as const
const ORIGINS = ['source', 'published', 'user', 'search', 'refined'] as const
type Chosen = { state?: (typeof STATES)[number]; origin?: (typeof ORIGINS)[number] }

// Trials that a request for a file has, the most that the server gives.
const FILE_PAGE = 1000

// Trials that can be compared at once.
const COMPARED = 2

/** All trials of a study, sorted and filtered by the server. */
export function Trials() {
  const { study } = useStudy()
  const search = trialsRoute.useSearch()
  const navigate = trialsRoute.useNavigate()
  const change = (changed: Partial<typeof search>) =>
    navigate({ search: { ...search, at: undefined, ...changed }, replace: true })
  const { q, where, state, origin, sort = 'number' } = search
  const [selected, setSelected] = useState<number[]>([])
  // As the rows, columns stay until the reader asks for what is new.
  const key = ['study', study.id, 'trials', 'parameters']
  const parameters = useQuery({ ...parameterNames(study.id), queryKey: key })
  const all = trialColumns(study, parameters.data?.names ?? [])
  const shown = shownColumns(all, search.columns)
  const load = async (offset: number, limit: number, signal?: AbortSignal): Promise<Page<Trial>> => {
    const query = { q, where: where ? [where] : undefined, sort, offset, limit, ...({ state, origin } as Chosen) }
    const params = { path: { study_id: study.id }, query }
    const { trials, total } = (await api.GET('/v1/studies/{study_id}/trials', { params, signal })).data!
    return { rows: trials, total }
  }
  const file = useMutation({
    mutationFn: async () => {
      const inFile = shown.flatMap(({ head, text }) => (text ? [{ head, text }] : []))
      const rows: Trial[] = []
      for (let total = Infinity; rows.length < total;) {
        const page = await load(rows.length, FILE_PAGE)
        rows.push(...page.rows)
        total = page.rows.length === 0 ? rows.length : page.total
      }
      const cells = rows.map((row) => inFile.map(({ text }) => text(row)))
      const heads = inFile.map(({ head }) => head)
      save(csv(heads, cells), `trials-${study.name}.csv`, 'text/csv')
    },
  })
  const select = (number: number, isSelected: boolean) =>
    setSelected((old) => [...old.filter((each) => each !== number), ...(isSelected ? [number] : [])].slice(-COMPARED))
  const [first, ...rest] = shown
  const columns: Column<Trial>[] = [first!, selection(selected, select), ...rest]
  return (
    <>
      <h2>Trials</h2>
      <div className="row" role="search">
        <Filter label="Label or number" value={q} onType={(text) => change({ q: text })} />
        <Filter
          label="Conditions"
          placeholder={`${study.objectives[0]?.name}>=0.6, rung<2`}
          value={where}
          onType={(text) => change({ where: text })}
        />
        <Choose
          label="State"
          any="any state"
          options={STATES.map((name) => ({ value: name, label: name.toLowerCase() }))}
          value={state}
          onChange={(chosen) => change({ state: chosen })}
        />
        <Choose
          label="Origin"
          any="any origin"
          options={ORIGINS}
          value={origin}
          onChange={(chosen) => change({ origin: chosen })}
        />
      </div>
      <div className="row" style={{ margin: '10px 0' }}>
        {/* In the order of their numbers, without filters, a trial is at its number. */}
        <Jump onJump={(number) => navigate({ search: { columns: search.columns, at: `${number}` }, replace: true })} />
        <ColumnMenu
          columns={all.filter(({ isAlways }) => !isAlways).map(({ head }) => head)}
          shown={shown.map(({ head }) => head)}
          onChange={(heads) => change({ columns: heads.join(',') || 'trial' })}
        />
        <Button size="xs" variant="default" loading={file.isPending} onClick={() => file.mutate()}>
          CSV of what is shown
        </Button>
        <Compared id={study.id} selected={selected} />
      </div>
      {file.error && <Failure error={file.error} />}
      <VirtualTable<Trial>
        label="Trials"
        noun="trial"
        columns={columns}
        queryKey={['study', study.id, 'trials', q, where, state, origin]}
        sort={sort}
        onSort={(chosen) => change({ sort: chosen })}
        load={load}
        at={trialNumber(search.at)}
      />
      <p className="soft">
        Values are those of the highest rung that a trial has finished. Sorted by a value, trials at full budget are
        first, because values on different numbers of samples are not comparable.
      </p>
    </>
  )
}

/** The column by which trials are selected for a comparison. */
const selection = (selected: number[], select: (number: number, isSelected: boolean) => void): Column<Trial> => ({
  head: 'compare',
  cell: ({ number }) => (
    <input
      type="checkbox"
      aria-label={`Compare trial ${number}`}
      checked={selected.includes(number)}
      onChange={(event) => select(number, event.currentTarget.checked)}
    />
  ),
})

function Compared({ id, selected }: { id: string; selected: number[] }) {
  const [a, b] = selected
  return (
    <span role="status" aria-label="Selected trials">
      {a === undefined ? (
        <span className="soft">Select two trials to compare them.</span>
      ) : b === undefined ? (
        <span className="soft">Trial {a} is selected; select another.</span>
      ) : (
        <Link to="/studies/$id/compare" params={{ id }} search={{ trials: `${a},${b}` }}>
          Compare trials {a} and {b}
        </Link>
      )}
    </span>
  )
}

function Jump({ onJump }: { onJump: (number: number) => void }) {
  const { study } = useStudy()
  const [text, setText] = useState('')
  const number = trialNumber(text)
  const total = Object.values(study.trials).reduce((sum, n) => sum + n, 0)
  const [error, setError] = useState<string>()
  const jump = (event: FormEvent) => {
    event.preventDefault()
    if (number === undefined || number >= total)
      setError(total === 0 ? 'There are no trials.' : `Give a number from 0 to ${total - 1}.`)
    else onJump(number)
  }
  return (
    <form className="row" onSubmit={jump}>
      <TextInput
        aria-label="Number of a trial"
        placeholder="trial"
        inputMode="numeric"
        style={{ width: 110 }}
        value={text}
        error={error}
        onChange={(event) => {
          setText(event.currentTarget.value)
          setError(undefined)
        }}
      />
      <Button type="submit" size="xs" variant="default">
        Jump
      </Button>
    </form>
  )
}
