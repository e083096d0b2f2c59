import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { api, BASE } from '../../api/client'
import { session as sessionQuery } from '../../api/queries'
import { maySubmit } from '../../api/rights'
import type { Session } from '../../api/types'
import { Answer, Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { Page } from '../../parts/Page'
import { newStudyRoute } from '../../router'
import { EnqueueRecipe } from './new/EnqueueRecipe'
import { StudyEditor } from './new/StudyEditor'
import type { Schemas } from './new/schema'
import { asYaml } from './new/yamlText'

// Studies that are offered to begin with.
const LIMIT = 100

/** A study file to write and submit, from an example, a former study or the experts of a fine-tuning. */
export function NewStudy() {
  const { recipe } = newStudyRoute.useSearch()
  const session = useQuery(sessionQuery)
  return (
    <Page title={recipe === undefined ? 'New study' : 'Enqueue a merge'}>
      <Answer of={session}>
        {(found) =>
          !maySubmit(found) ? (
            <Nothing>This session may only read: it submits no studies.</Nothing>
          ) : recipe === undefined ? (
            <Begun session={found} />
          ) : (
            <EnqueueRecipe recipe={recipe} session={found} />
          )
        }
      </Answer>
    </Page>
  )
}

const schemasQuery = {
  queryKey: ['openapi'],
  queryFn: async ({ signal }: { signal: AbortSignal }): Promise<Schemas> => {
    const found = await fetch(`${BASE}/openapi.json`, { signal })
    if (!found.ok) throw new Error(`the schema of study files: ${found.status} ${found.statusText}`)
    return (await found.json()).components.schemas
  },
  staleTime: Infinity,
}

function Begun({ session }: { session: Session }) {
  const search = newStudyRoute.useSearch()
  const navigate = newStudyRoute.useNavigate()
  const { from, finetune } = search
  const name = `${from} ${finetune}`
  const schemas = useQuery(schemasQuery)
  const start = useQuery({
    queryKey: ['start', from, finetune],
    queryFn: ({ signal }) =>
      finetune !== undefined
        ? ofFinetune(finetune, signal)
        : from !== undefined
          ? ofStudy(from, signal)
          : example(signal),
    staleTime: Infinity,
    gcTime: 0, // a file that is edited and left begins anew
    refetchOnMount: false,
  })
  const studies = useQuery({
    queryKey: ['studies', 'to start from'],
    queryFn: async ({ signal }) =>
      (await api.GET('/v1/studies', { params: { query: { sort: '-created', limit: LIMIT } }, signal })).data!.studies,
  })
  const options = (studies.data ?? []).map(({ id, name }) => ({
    value: id,
    label: `study ${name} (${id.slice(0, 8)})`,
  }))
  return (
    <>
      <div className="row">
        <span id="start">Start from</span>
        <Choose
          label="Start from"
          any="the shipped example"
          options={from === undefined || options.some(({ value }) => value === from) ? options : [from, ...options]}
          value={from}
          onChange={(chosen) => navigate({ search: { from: chosen } })}
        />
      </div>
      {finetune !== undefined && (
        <p>
          Base and experts are those of{' '}
          <Link to="/finetunes/$id" params={{ id: finetune }}>
            a fine-tuning
          </Link>
          .
        </p>
      )}
      <Answer of={schemas}>
        {(found) => (
          <Answer of={start}>
            {(text) => <StudyEditor key={name} name={name} start={text} schemas={found} session={session} />}
          </Answer>
        )}
      </Answer>
    </>
  )
}

async function example(signal: AbortSignal): Promise<string> {
  return (await api.GET('/v1/studies:example', { signal, parseAs: 'text' })).data!
}

/** The file of a former study, under another name. */
async function ofStudy(id: string, signal: AbortSignal): Promise<string> {
  const params = { path: { study_id: id } }
  const file = (await api.GET('/v1/studies/{study_id}/study', { params, signal })).data!
  return asYaml({ ...file, name: another(file.name) })
}

/** The name with the next number. */
export function another(name: string): string {
  const number = /-(\d+)$/.exec(name)
  return number ? `${name.slice(0, number.index)}-${Number(number[1]) + 1}` : `${name}-2`
}

/** A study of the experts of a fine-tuning: the example's search, with the models that the fine-tuning has. */
async function ofFinetune(id: string, signal: AbortSignal): Promise<string> {
  const params = { path: { finetune_id: id } }
  const file = (await api.GET('/v1/finetunes/{finetune_id}/specification', { params, signal })).data!
  const { name, base, experts } = file as { name: string; base: string; experts?: Record<string, unknown> }
  const aliases = Object.keys(experts ?? { [name]: null })
  const models = { base, experts: Object.fromEntries(aliases.map((alias) => [alias, ''])) }
  const note = `# Experts of fine-tuning ${name} (${id}).\n# Download each from its page, and give the directory on the server here.\n`
  return note + asYaml({ name: `${name}-merge`, models, objectives: [{ name: 'task', task: '', metric: '' }] })
}
