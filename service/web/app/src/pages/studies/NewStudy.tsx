import { Button, FileButton } from '@mantine/core'
import { useMutation, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useMemo, useRef } from 'react'
import { api } from '../../api/client'
import { session as sessionQuery } from '../../api/queries'
import { maySubmit } from '../../api/rights'
import type { Session } from '../../api/types'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { Page } from '../../parts/Page'
import { StudyPicker } from '../../parts/StudyPicker'
import { newStudyRoute } from '../../router'
import { EXAMPLES } from './examples'
import { EnqueueRecipe } from './new/EnqueueRecipe'
import { useDraft } from './new/drafts'
import { StudyEditor } from './new/StudyEditor'
import { schemasQuery } from './new/schemas'
import { asYaml } from './new/yamlText'

/** A study file to write and submit, from an example, a former study or the experts of a fine-tuning. */
export function NewStudy() {
  const search = newStudyRoute.useSearch()
  const { recipe } = search
  const session = useQuery(sessionQuery)
  return (
    <Page title={recipe === undefined ? 'New study' : 'Enqueue a merge'}>
      <Answer of={session}>
        {(found) =>
          !maySubmit(found) ? (
            <Nothing>This session may only read: it submits no studies.</Nothing>
          ) : recipe === undefined ? (
            <Begun key={JSON.stringify(search)} session={found} />
          ) : (
            <EnqueueRecipe recipe={recipe} session={found} />
          )
        }
      </Answer>
    </Page>
  )
}

function Begun({ session }: { session: Session }) {
  const search = newStudyRoute.useSearch()
  const navigate = newStudyRoute.useNavigate()
  const { from, finetune } = search
  const example = EXAMPLES.find(({ name }) => name === search.example)?.name
  // Outlasts a reload, as the edited text does; another beginning, such as a clone, does not have it.
  const [begun, setBegun, forgetBegun] = useDraft(`mergekit file ${from} ${finetune} ${example}`, '')
  const merge = useMemo(() => (begun === '' ? undefined : (JSON.parse(begun) as BegunStudy)), [begun])
  const name = merge ? `mergekit ${merge.number}` : `${from} ${finetune} ${example}`
  const schemas = useQuery(schemasQuery)
  const start = useQuery({
    queryKey: ['start', from, finetune, example],
    queryFn: ({ signal }) =>
      finetune !== undefined
        ? ofFinetune(finetune, signal)
        : from !== undefined
          ? ofStudy(from, signal)
          : shipped(example, signal),
    staleTime: Infinity,
    gcTime: 0, // a file that is edited and left begins anew
    refetchOnMount: false,
  })
  const editor = (text: string) => (
    <Answer of={schemas}>
      {(found) => (
        <StudyEditor key={name} name={name} start={text} schemas={found} session={session} onSubmitted={forgetBegun} />
      )}
    </Answer>
  )
  return (
    <>
      <div className="row">
        <span>Start from</span>
        <StudyPicker
          label="Start from"
          any={EXAMPLES[0]!.label}
          more={EXAMPLES.slice(1).map(({ name: value, label }) => ({ value: `example ${value}`, label }))}
          value={from ?? (example && example !== EXAMPLES[0]!.name ? `example ${example}` : undefined)}
          onChange={(chosen) => {
            setBegun('')
            const [, shippedName] = /^example (.*)$/.exec(chosen ?? '') ?? []
            navigate({ search: shippedName === undefined ? { from: chosen } : { example: shippedName } })
          }}
        />
        <FromMergekit onBegun={(file) => setBegun(JSON.stringify(file))} />
      </div>
      {merge !== undefined ? (
        <>
          <p>
            Models and a recipe are those of {merge.file}: its merge is scored beside those that the search proposes.
            Give the objectives.
          </p>
          {merge.warnings.length > 0 && (
            <ul aria-label="Warnings about the mergekit file">
              {merge.warnings.map((warning) => (
                <li key={warning}>{warning}</li>
              ))}
            </ul>
          )}
          {editor(merge.text)}
        </>
      ) : (
        <>
          {finetune !== undefined && (
            <p>
              Base and experts are those of{' '}
              <Link to="/finetunes/$id" params={{ id: finetune }}>
                a fine-tuning
              </Link>
              . Give the objectives.
            </p>
          )}
          <Answer of={start}>{editor}</Answer>
        </>
      )}
    </>
  )
}

/** The beginning of a study from a mergekit file. */
interface BegunStudy {
  file: string
  text: string
  warnings: string[]
  number: number
}

/** A button that reads a mergekit file of the reader's machine; the server makes the beginning of a study from it. */
function FromMergekit({ onBegun }: { onBegun: (begun: BegunStudy) => void }) {
  const reset = useRef<() => void>(null)
  const begin = useMutation({
    mutationFn: async (file: File): Promise<BegunStudy> => {
      const name =
        file.name
          .replace(/\.[^.]*$/, '')
          .replace(/[^\w.-]+/g, '-')
          .replace(/^[^A-Za-z0-9]+/, '') || 'mergekit'
      const { study, warnings } = (
        await api.POST('/v1/studies:from_mergekit', {
          params: { query: { name: name.slice(0, 63) } },
          headers: { 'Content-Type': 'application/yaml' },
          body: (await file.text()) as never,
          bodySerializer: (body: unknown) => body as string,
        })
      ).data!
      return { file: file.name, text: asYaml(study), warnings, number: Date.now() }
    },
    onSuccess: onBegun,
  })
  return (
    <>
      <FileButton
        accept=".yml,.yaml,.json"
        resetRef={reset}
        onChange={(file) => {
          if (file) begin.mutate(file)
          reset.current?.() // so that the same file can be chosen again
        }}
      >
        {(props) => (
          <Button {...props} size="xs" variant="default" loading={begin.isPending}>
            A mergekit file
          </Button>
        )}
      </FileButton>
      {begin.error && <Failure error={begin.error} />}
    </>
  )
}

async function shipped(name: (typeof EXAMPLES)[number]['name'] | undefined, signal: AbortSignal): Promise<string> {
  return (await api.GET('/v1/studies:example', { params: { query: { name } }, signal, parseAs: 'text' })).data!
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

/** A study of the experts of a fine-tuning, which the server finds by its id. */
async function ofFinetune(id: string, signal: AbortSignal): Promise<string> {
  const params = { path: { finetune_id: id } }
  const file = (await api.GET('/v1/finetunes/{finetune_id}/specification', { params, signal })).data!
  const { name, base, experts } = file as { name: string; base: string; experts?: Record<string, unknown> }
  const aliases = Object.keys(experts ?? { [name]: null })
  const trained = aliases.map((alias) => [alias, { from_finetune: { id } }] as const)
  return (
    `# Experts of the fine-tuning ${name}.\n` +
    asYaml({
      name: `${name}-merge`,
      models: { base, experts: Object.fromEntries(trained) },
      fidelity: { scheduler: 'none' },
      objectives: [{ name: 'task', task: '', metric: '' }],
    })
  )
}
