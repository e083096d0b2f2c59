import { Progress } from '@mantine/core'
import { Link } from '@tanstack/react-router'
import { api } from '../../api/client'
import { useMaySubmit } from '../../api/rights'
import type { Finetune, TrainingProgress } from '../../api/types'
import { type JobColumn, JobList, SubmitCommand } from '../../parts/JobList'
import { jobQuery } from '../../parts/JobFilters'
import { Page } from '../../parts/Page'
import { finetunesRoute } from '../../router'
import { shareDone, withProgress } from './progress'

const COLUMNS: JobColumn<Finetune>[] = [
  {
    head: 'method',
    isText: true,
    cell: ({ experts }) => [...new Set(Object.values(experts).map(({ method }) => method))].join(', '),
  },
  {
    head: 'experts trained',
    cell: ({ experts }) => {
      const all = Object.values(experts)
      return `${all.filter(({ bytes }) => bytes !== null).length} of ${all.length}`
    },
  },
  {
    head: 'progress',
    isText: true,
    width: 120,
    cell: ({ name, experts }) => <Progress aria-label={`Progress of ${name}`} value={100 * shareDone(experts)} />,
  },
]

/** All fine-tunings that the user may read. */
export function FinetuneList() {
  const search = finetunesRoute.useSearch()
  const navigate = finetunesRoute.useNavigate()
  const maySubmit = useMaySubmit()
  return (
    <Page title="Fine-tunings">
      <JobList<Finetune>
        kind="finetune"
        listKey="finetunes"
        noun={{ one: 'fine-tuning', many: 'fine-tunings' }}
        search={search}
        onSearch={(changed) => navigate({ search: { ...search, ...changed }, replace: true })}
        load={async (signal) => {
          const found = (await api.GET('/v1/finetunes', { params: { query: jobQuery(search) }, signal })).data!
          return { jobs: found.finetunes, total: found.total }
        }}
        withProgress={(finetune, progress) => withProgress(finetune, progress as unknown as TrainingProgress)}
        link={({ id, name }) => (
          <Link to="/finetunes/$id" params={{ id }}>
            {name}
          </Link>
        )}
        columns={COLUMNS}
        beside={maySubmit && <Link to="/finetunes/new">New fine-tuning</Link>}
        empty={
          <SubmitCommand
            noun="There are no fine-tunings yet. This command submits a specification:"
            file="finetune.yaml"
          />
        }
      />
    </Page>
  )
}
