import { Progress } from '@mantine/core'
import { keepPreviousData, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { api } from '../../api/client'
import { useMaySubmit } from '../../api/rights'
import type { Finetune } from '../../api/types'
import { duration, localTime } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { JobCount, JobFilters, jobQuery } from '../../parts/JobFilters'
import { Page } from '../../parts/Page'
import { State } from '../../parts/State'
import { finetunesRoute } from '../../router'
import { shareDone } from './progress'

/** All fine-tunings that the user may read. */
export function FinetuneList() {
  const search = finetunesRoute.useSearch()
  const navigate = finetunesRoute.useNavigate()
  const change = (changed: Partial<typeof search>) => navigate({ search: { ...search, ...changed }, replace: true })
  const maySubmit = useMaySubmit()
  const finetunes = useQuery({
    queryKey: ['finetunes', search],
    queryFn: async ({ signal }) =>
      (await api.GET('/v1/finetunes', { params: { query: jobQuery(search) }, signal })).data!,
    refetchInterval: 5000,
    placeholderData: keepPreviousData,
  })
  return (
    <Page title="Fine-tunings">
      <JobFilters search={search} onChange={change} />
      {maySubmit && (
        <p>
          <Link to="/finetunes/new">New fine-tuning</Link>
        </p>
      )}
      <Answer of={finetunes}>
        {({ finetunes: found, total }) =>
          found.length > 0 ? (
            <Table finetunes={found} total={total} />
          ) : search.q || search.state ? (
            <Nothing>No fine-tuning matches.</Nothing>
          ) : (
            <Empty />
          )
        }
      </Answer>
    </Page>
  )
}

function Table({ finetunes, total }: { finetunes: Finetune[]; total: number }) {
  return (
    <>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Table of fine-tunings">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                name
              </th>
              <th scope="col" className="l">
                state
              </th>
              <th scope="col" className="l">
                method
              </th>
              <th scope="col">experts trained</th>
              <th scope="col" className="l">
                progress
              </th>
              <th scope="col" className="l">
                owner
              </th>
              <th scope="col">time</th>
              <th scope="col">created</th>
            </tr>
          </thead>
          <tbody>
            {finetunes.map((finetune) => (
              <Row key={finetune.id} finetune={finetune} />
            ))}
          </tbody>
        </table>
      </div>
      <JobCount total={total} shown={finetunes.length} one="fine-tuning" many="fine-tunings" />
    </>
  )
}

function Row({ finetune }: { finetune: Finetune }) {
  const experts = Object.values(finetune.experts)
  const methods = [...new Set(experts.map((expert) => expert.method))]
  return (
    <tr>
      <td className="l">
        <Link to="/finetunes/$id" params={{ id: finetune.id }}>
          {finetune.name}
        </Link>
      </td>
      <td className="l">
        <State state={finetune.state} />
        {finetune.waiting_for && <small>{finetune.waiting_for}</small>}
      </td>
      <td className="l">{methods.join(', ')}</td>
      <td>
        {experts.filter((expert) => expert.bytes !== null).length} of {experts.length}
      </td>
      <td className="l" style={{ minWidth: 120 }}>
        <Progress aria-label={`Progress of ${finetune.name}`} value={100 * shareDone(finetune.experts)} />
      </td>
      <td className="l">{finetune.owner}</td>
      <td>{duration(finetune.wall_clock_s)}</td>
      <td title={finetune.created_at}>{localTime(finetune.created_at)}</td>
    </tr>
  )
}

function Empty() {
  return (
    <>
      <Nothing>There are no fine-tunings yet. This command submits a specification:</Nothing>
      <pre>{`mergesearch submit finetune.yaml --server ${new URL(document.baseURI).href}`}</pre>
    </>
  )
}
