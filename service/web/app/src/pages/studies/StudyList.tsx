import { Progress } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { Suspense, lazy } from 'react'
import { api } from '../../api/client'
import { session as sessionQuery } from '../../api/queries'
import { maySubmit } from '../../api/rights'
import type { Progress as StudyProgress, Study } from '../../api/types'
import { count, interval, value } from '../../format'
import { type JobColumn, JobList, SubmitCommand } from '../../parts/JobList'
import { jobQuery } from '../../parts/JobFilters'
import { Page } from '../../parts/Page'
import { stepsOf } from '../../parts/steps'
import { studiesRoute } from '../../router'
import { EXAMPLES } from './examples'

// Loaded after the list: menus and dialogs would be in the first script otherwise.
const StudyMenu = lazy(async () => ({ default: (await import('../study/actions/StudyMenu')).StudyMenu }))
const UNFINISHED = new Set(['RUNNING', 'WAITING'])

const COLUMNS: JobColumn<Study>[] = [
  { head: 'searcher', isText: true, cell: ({ algorithm }) => algorithm },
  { head: 'best so far', isText: true, cell: ({ progress }) => <Best progress={progress} /> },
  { head: 'trials', cell: ({ trials }) => count(finished(trials)) },
  {
    head: 'progress',
    isText: true,
    width: 120,
    cell: ({ name, progress }) => (
      <>
        {progress && progress.samples_planned > 0 && (
          <Progress
            aria-label={`Progress of ${name}`}
            value={Math.min(100, (100 * progress.samples_scored) / progress.samples_planned)}
          />
        )}
        <Steps progress={progress} />
      </>
    ),
  },
  {
    head: 'samples/s',
    title: () => 'samples scored, over the time that the study has worked',
    cell: ({ progress, wall_clock_s }) => speed(progress?.samples_scored, wall_clock_s),
  },
]

/** All studies that the user may read. */
export function StudyList() {
  const search = studiesRoute.useSearch()
  const navigate = studiesRoute.useNavigate()
  const isSubmitter = maySubmit(useQuery(sessionQuery).data)
  return (
    <Page title="Studies">
      <JobList<Study>
        kind="search"
        listKey="studies"
        noun={{ one: 'study', many: 'studies' }}
        search={search}
        onSearch={(changed) => navigate({ search: { ...search, ...changed }, replace: true })}
        load={async (signal) => {
          const found = (await api.GET('/v1/studies', { params: { query: jobQuery(search) }, signal })).data!
          return { jobs: found.studies, total: found.total }
        }}
        withProgress={(study, told) => {
          const progress = told as unknown as StudyProgress
          return { ...study, progress, trials: progress.trials ?? study.trials }
        }}
        link={({ id, name }) => (
          <Link to="/studies/$id" params={{ id }}>
            {name}
          </Link>
        )}
        columns={COLUMNS}
        beside={isSubmitter && <Link to="/studies/new">New study</Link>}
        actions={
          isSubmitter
            ? (study) => (
                <Suspense>
                  <StudyMenu study={study} isSmall />
                </Suspense>
              )
            : undefined
        }
        empty={<Empty isSubmitter={isSubmitter} />}
      />
    </Page>
  )
}

// A job that has not reported yet has no progress, and one of another version may lack a part of it.
const speed = (samples: number | undefined, seconds: number) =>
  samples !== undefined && seconds > 0 && (samples / seconds).toPrecision(3)

const finished = (trials: Study['trials']) =>
  Object.entries(trials ?? {}).reduce((sum, [state, n]) => sum + (UNFINISHED.has(state) ? 0 : n), 0)

/** The best trial's value of each objective, named, with its 95 % interval. */
function Best({ progress }: { progress: StudyProgress | null }) {
  return Object.entries(progress?.best ?? {}).map(([name, x]) => {
    const limits = progress?.best_ci95?.[name]
    return (
      <div key={name}>
        <span className="soft">{name}</span> {value(x)}
        {limits && <span className="interval">{interval(limits[0]!, limits[1]!)}</span>}
      </div>
    )
  })
}

/** The gradient steps and policy updates of a study that makes some: samples are scored only after them. */
function Steps({ progress }: { progress: StudyProgress | null }) {
  const steps = stepsOf(progress)
  return steps && <span className="soft">{`${count(steps.made)} of ${count(steps.planned)} steps`}</span>
}

function Empty({ isSubmitter }: { isSubmitter: boolean }) {
  return (
    <>
      <SubmitCommand noun="There are no studies yet. This command submits a study file:" file="study.yaml" />
      {isSubmitter && (
        <>
          <p>Or begin with an example, which merges the models that are shipped:</p>
          <ul aria-label="Examples">
            {EXAMPLES.map(({ name, label }) => (
              <li key={name}>
                <Link to="/studies/new" search={{ example: name }}>
                  {label}
                </Link>
              </li>
            ))}
          </ul>
        </>
      )}
    </>
  )
}
