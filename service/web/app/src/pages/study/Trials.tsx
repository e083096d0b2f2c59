import { Link } from '@tanstack/react-router'
import { api } from '../../api/client'
import type { Trial } from '../../api/types'
import { count, value } from '../../format'
import { Choose } from '../../parts/Choose'
import { Filter } from '../../parts/Filter'
import { State } from '../../parts/State'
import { type Column, VirtualTable } from '../../parts/VirtualTable'
import { trialsRoute } from '../../router'
import { useStudy } from './StudyLayout'

const STATES = ['WAITING', 'RUNNING', 'COMPLETE', 'PRUNED', 'FAIL'] as const
const ORIGINS = ['source', 'published', 'user', 'search', 'refined'] as const
type Chosen = { state?: (typeof STATES)[number]; origin?: (typeof ORIGINS)[number] }

/** All trials of a study, sorted and filtered by the server. */
export function Trials() {
  const { study } = useStudy()
  const search = trialsRoute.useSearch()
  const navigate = trialsRoute.useNavigate()
  const change = (changed: Partial<typeof search>) => navigate({ search: { ...search, ...changed }, replace: true })
  const { q, where, state, origin, sort = 'number' } = search
  const names = study.objectives.map(({ name }) => name)
  const columns = columnsOf(study.id, names)
  return (
    <>
      <h2>Trials</h2>
      <div className="row" role="search">
        <Filter label="Label or number" value={q} onType={(text) => change({ q: text })} />
        <Filter
          label="Conditions"
          placeholder={`${names[0]}>=0.6, rung<2`}
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
      <VirtualTable<Trial>
        label="Trials"
        noun="trial"
        columns={columns}
        queryKey={['study', study.id, 'trials', q, where, state, origin]}
        sort={sort}
        onSort={(chosen) => change({ sort: chosen })}
        load={async (offset, limit, signal) => {
          const query = { q, where: where ? [where] : undefined, sort, offset, limit, ...({ state, origin } as Chosen) }
          const params = { path: { study_id: study.id }, query }
          const { trials, total } = (await api.GET('/v1/studies/{study_id}/trials', { params, signal })).data!
          return { rows: trials, total }
        }}
      />
      <p className="soft">
        Values are those of the highest rung that a trial has finished. Sorted by a value, trials at full budget are
        first, because values on different numbers of samples are not comparable.
      </p>
    </>
  )
}

function columnsOf(id: string, names: string[]): Column<Trial>[] {
  return [
    {
      sort: 'number',
      head: 'trial',
      cell: ({ number }) => (
        <Link to="/studies/$id/trials/$number" params={{ id, number: `${number}` }}>
          {number}
        </Link>
      ),
    },
    { sort: 'label', head: 'label', isText: true, cell: ({ label }) => label },
    { sort: 'state', head: 'state', isText: true, cell: ({ state }) => <State state={state} /> },
    { sort: 'origin', head: 'origin', isText: true, cell: ({ origin }) => origin },
    { sort: 'rung', head: 'rung', cell: (trial) => trial.rungs.at(-1)?.rung },
    { sort: 'samples', head: 'samples', cell: (trial) => samples(trial) },
    ...names.map((name) => ({
      sort: `value.${name}`,
      head: name,
      cell: (trial: Trial) => {
        const last = trial.rungs.at(-1)
        const error = last?.standard_errors[name]
        return (
          <>
            {value(last?.values[name])}
            {error != null && <small>± {value(error)}</small>}
          </>
        )
      },
    })),
  ]
}

function samples(trial: Trial): string {
  const last = trial.rungs.at(-1)
  return last ? count(Object.values(last.samples).reduce((a, b) => a + b, 0)) : ''
}
