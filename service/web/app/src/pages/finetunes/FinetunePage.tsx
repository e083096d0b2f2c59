import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { BASE } from '../../api/client'
import { useLive } from '../../api/live'
import { finetune as finetuneQuery } from '../../api/queries'
import { useMaySubmit } from '../../api/rights'
import type { Finetune, TrainingProgress } from '../../api/types'
import { count, duration, percent } from '../../format'
import { Answer } from '../../parts/Answer'
import { Figures } from '../../parts/Figures'
import { JobActions } from '../../parts/JobActions'
import { JobHead, JobNotes } from '../../parts/JobHead'
import { Page } from '../../parts/Page'
import { finetuneRoute } from '../../router'
import { AnalysisOfExperts } from './AnalysisOfExperts'
import { Curves } from './Curves'
import { Experts } from './Experts'
import { shareDone, withProgress } from './progress'

/** One fine-tuning: its experts, their losses and evaluations, and the analysis of their merges. */
export function FinetunePage() {
  const { id } = finetuneRoute.useParams()
  const query = useQuery(finetuneQuery(id))
  const key = ['finetune', id]
  const { progress, connection } = useLive<TrainingProgress>(`/v1/finetunes/${id}`, key, query.data?.last_event_id)
  return (
    <Answer title="Fine-tuning" of={query}>
      {(stored) => {
        const finetune = withProgress(stored, progress)
        return (
          <Page title={finetune.name} before={<JobHead job={finetune} connection={connection} />}>
            <JobNotes job={finetune} />
            <JobActions
              kind="finetune"
              job={finetune}
              queryKey={key}
              cancelled={<p>The training ends now. Experts that are trained are kept. It cannot be resumed.</p>}
              deleted={<p>The fine-tuning is deleted with its experts and files.</p>}
            >
              <Links finetune={finetune} />
            </JobActions>
            <Key finetune={finetune} />
            <Experts finetune={finetune} />
            <Curves finetune={finetune} />
            <AnalysisOfExperts finetune={finetune} />
          </Page>
        )
      }}
    </Answer>
  )
}

function Links({ finetune }: { finetune: Finetune }) {
  const { id, links } = finetune
  const maySubmit = useMaySubmit()
  const isTrained = Object.values(finetune.experts).every((expert) => expert.bytes !== null)
  const study = links.study?.split('/').at(-1)
  return (
    <>
      {maySubmit && isTrained && (
        <Link to="/studies/new" search={{ finetune: id }}>
          Search merges of these experts
        </Link>
      )}
      {study !== undefined && (
        <Link to="/studies/$id" params={{ id: study }}>
          Study of the experts
        </Link>
      )}
      {maySubmit && (
        <Link to="/finetunes/new" search={{ from: id }}>
          Clone
        </Link>
      )}
      {['report', 'specification', 'log'].map((name) => (
        <a key={name} href={`${BASE}/v1/finetunes/${id}/${name}`}>
          {name[0]!.toUpperCase() + name.slice(1)}
        </a>
      ))}
    </>
  )
}

function Key({ finetune }: { finetune: Finetune }) {
  const experts = Object.values(finetune.experts)
  const begun = experts.flatMap(({ progress }) => progress ?? [])
  const trained = experts.filter((expert) => expert.bytes !== null).length
  const rows = [
    { term: 'experts trained', value: `${trained} of ${experts.length}` },
    {
      term: 'updates',
      value: count(begun.reduce((sum, each) => sum + each.step, 0)),
      note:
        begun.length === 0
          ? 'no expert has begun'
          : `of ${count(begun.reduce((sum, each) => sum + each.steps, 0))}${begun.length < experts.length ? ' of the experts that have begun' : ''}`,
    },
    { term: 'progress', value: percent(shareDone(finetune.experts)) },
    { term: 'time', value: duration(finetune.wall_clock_s) },
  ]
  return <Figures rows={rows} />
}
