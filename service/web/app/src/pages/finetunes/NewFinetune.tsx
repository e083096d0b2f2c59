import { Button, Textarea } from '@mantine/core'
import { useMutation, useQuery } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { type ReactNode, useMemo, useRef } from 'react'
import { api, Refused } from '../../api/client'
import { useSession } from '../../api/session'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { type Ownership, useOwnership } from '../../parts/Ownership'
import { Page } from '../../parts/Page'
import { newFinetuneRoute } from '../../router'
import { useMaySubmit } from '../../api/rights'
import type { Form } from '../studies/new/FormParts'
import { ModelsOffered } from '../studies/new/ModelField'
import { useDraft } from '../studies/new/drafts'
import type { Schemas } from '../studies/new/schema'
import { schemasQuery } from '../studies/new/schemas'
import { asYaml, isJson, parsed } from '../studies/new/yamlText'
import { FinetuneForm } from './FinetuneForm'
import { errorAt } from './fleet'

const EXAMPLE = `name: family
base: /models/base
data: {max_length: 256}
training: {steps: 500, batch: 32, learning_rate: 2.0e-5}
experts:
  math: {data: {file: /data/math_train.jsonl}}
  text: {data: {file: /data/text_train.jsonl}, training: {steps: 800}}
`

interface Sent extends Ownership {
  specification: string
}

/** A specification as text and form, which is submitted as a fine-tuning; `from` in the address copies another one. */
export function NewFinetune() {
  const { from } = newFinetuneRoute.useSearch()
  const maySubmit = useMaySubmit()
  const schemas = useQuery(schemasQuery)
  const copied = useQuery({
    queryKey: ['finetune', from, 'specification'],
    queryFn: async ({ signal }) => {
      const params = { path: { finetune_id: from! } }
      const found = (await api.GET('/v1/finetunes/{finetune_id}/specification', { params, signal })).data!
      return asYaml(found)
    },
    enabled: from !== undefined,
    staleTime: Infinity,
  })
  const editor = (key: string, initial: string) => (
    <Answer of={schemas}>
      {(found) => <Editor key={key} name={`fine-tuning ${key}`} initial={initial} schemas={found} />}
    </Answer>
  )
  return (
    <Page title="New fine-tuning">
      {!maySubmit ? (
        <Nothing>You may not submit fine-tunings with this login.</Nothing>
      ) : from === undefined ? (
        editor('example', EXAMPLE)
      ) : (
        <Answer of={copied}>{(text) => editor(from, text)}</Answer>
      )}
    </Page>
  )
}

/** One document as text and as a form; a problem that a submission has is at its field until the text changes. */
function Editor({ name, initial, schemas }: { name: string; initial: string; schemas: Schemas }) {
  const navigate = useNavigate()
  const [text, setText, forget] = useDraft(name, initial)
  const { ownership, controls } = useOwnership(useSession())
  // The same key as long as the request is the same, so that a repeated request creates nothing twice.
  const sent = useRef({ of: '', key: '' })
  const submit = useMutation({
    mutationFn: async ({ specification, team, sharing }: Sent) => {
      const of = JSON.stringify([specification, team, sharing])
      if (sent.current.of !== of) sent.current = { of, key: randomKey() }
      const answer = await api.POST('/v1/finetunes', {
        params: { query: { team, sharing }, header: { 'Idempotency-Key': sent.current.key } },
        headers: { 'Content-Type': isJson(specification) ? 'application/json' : 'application/yaml' },
        body: specification as never,
        bodySerializer: (body) => body as unknown as string,
      })
      return answer.data!
    },
    onSuccess: (made) => {
      forget()
      navigate({ to: '/finetunes/$id', params: { id: made.id } })
    },
  })
  const { content, error } = useMemo(() => parsed(text), [text])
  const isOfText = submit.variables?.specification === text
  const refused = submit.error instanceof Refused && isOfText ? submit.error.problem.problems : undefined
  const form: Form = {
    schemas,
    root: schemas.FinetuneSpec ?? {},
    content,
    errorOf: (field) => errorAt(field, refused ?? [], content),
    change: (edit) => setText((before) => edit(before)),
  }
  return (
    <div className="halves">
      <section aria-label="Form">
        <h2>Form</h2>
        {error === undefined ? (
          <ModelsOffered>
            <FinetuneForm form={form} />
          </ModelsOffered>
        ) : (
          <p>The form follows when the text is YAML again: {error.message.split('\n')[0]}</p>
        )}
      </section>
      <div className="beside">
        <Text
          initial={initial}
          text={text}
          setText={setText}
          controls={controls}
          isPending={submit.isPending}
          error={submit.error}
          onSubmit={() => submit.mutate({ specification: text, ...ownership })}
        />
      </div>
    </div>
  )
}

function Text(props: {
  initial: string
  text: string
  setText: (text: string) => void
  /** What is chosen besides the text. */
  controls: ReactNode
  isPending: boolean
  error: Error | null
  onSubmit: () => void
}) {
  const { initial, text, setText, controls, isPending, error, onSubmit } = props
  return (
    <form
      onSubmit={(event) => {
        event.preventDefault()
        onSubmit()
      }}
    >
      <Textarea
        label="Specification"
        description="YAML or JSON. Its paths are absolute, because the server reads them."
        autosize
        minRows={12}
        maxRows={36}
        spellCheck={false}
        autoCapitalize="off"
        styles={{ input: { fontFamily: 'ui-monospace, monospace' } }}
        value={text}
        onChange={(event) => setText(event.currentTarget.value)}
      />
      {error && <Failure error={error} />}
      {controls && <div className="row">{controls}</div>}
      <p>
        <Button type="submit" disabled={isPending}>
          Submit
        </Button>
        {text !== initial && (
          <Button variant="subtle" ml="xs" onClick={() => setText(initial)}>
            Begin again
          </Button>
        )}
      </p>
    </form>
  )
}

/** A key for a request that creates something. */
function randomKey(): string {
  return Array.from(crypto.getRandomValues(new Uint32Array(4)), (word) => word.toString(16).padStart(8, '0')).join('')
}
