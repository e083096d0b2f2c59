import type { Study } from '../api/types'
import { Choose } from './Choose'
import { Filter } from './Filter'

const STATES = ['CREATED', 'RUNNING', 'PAUSED', 'STOPPED', 'COMPLETE', 'FAILED', 'CANCELLED'] as const
const SORTS = [
  { value: '-created', label: 'newest first' },
  { value: 'created', label: 'oldest first' },
  { value: 'name', label: 'name' },
  { value: 'state', label: 'state' },
  { value: 'owner', label: 'owner' },
  { value: '-priority', label: 'priority' },
]
const LIMIT = 200

/** What a list of jobs is filtered and sorted by, as its address has it. */
export interface JobSearch {
  q?: string
  state?: string
  sort?: string
}

/** The query of the API for what the address of a list says. */
export function jobQuery({ q, state, sort = '-created' }: JobSearch) {
  return { q, state: state as Study['state'] | undefined, sort: sort as '-created', limit: LIMIT }
}

/** Search text, state and order of a list of jobs; the server filters and sorts. */
export function JobFilters(props: { search: JobSearch; onChange: (changed: JobSearch) => void }) {
  const { search, onChange } = props
  return (
    <div className="row" role="search">
      <Filter
        label="Search by name, description or owner"
        placeholder="Search"
        value={search.q}
        onType={(q) => onChange({ q })}
      />
      <Choose
        label="State"
        any="any state"
        options={STATES.map((name) => ({ value: name, label: name.toLowerCase() }))}
        value={search.state}
        onChange={(chosen) => onChange({ state: chosen })}
      />
      <Choose
        label="Order"
        options={SORTS}
        value={search.sort ?? '-created'}
        onChange={(chosen) => onChange({ sort: chosen })}
      />
    </div>
  )
}
