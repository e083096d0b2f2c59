import { Button } from '@mantine/core'
import { useDebouncedValue } from '@mantine/hooks'
import { keepPreviousData, useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { useMemo, useRef } from 'react'
import { api, Refused } from '../../../api/client'
import type { Check, FieldProblem, Session } from '../../../api/types'
import { Failure } from '../../../parts/Answer'
import { type Ownership, useOwnership } from '../../../parts/Ownership'
import { idOf } from './Field'
import { ModelsOffered } from './ModelField'
import { Plan } from './Plan'
import { useDraft } from './drafts'
import type { Form } from './FormParts'
import { StudyForm } from './StudyForm'
import { type Editor, TextEditor } from './TextEditor'
import type { Schemas } from './schema'
import { parsed, pathOf, rangeOf } from './yamlText'

const CHECK_AFTER_MS = 400
const HEADERS = { 'Content-Type': 'application/yaml' }

/** Sends a text as the body of a request; the API's types have the body as JSON only. */
const asText = (text: string) => ({ body: text as never, bodySerializer: (body: unknown) => body as string })

/** The check of a text; a text that is no YAML mapping has its problem as an answer too. */
async function checked(text: string, level: 'syntax' | 'full', signal?: AbortSignal): Promise<Check> {
  try {
    const params = { query: { level } }
    return (await api.POST('/v1/studies:check', { params, headers: HEADERS, signal, ...asText(text) })).data!
  } catch (error) {
    if (error instanceof Refused && error.problem.status === 422) {
      return { is_valid: false, problems: problemsOf(error), plan: null }
    }
    throw error
  }
}

const problemsOf = ({ problem }: Refused): FieldProblem[] =>
  problem.problems?.length ? problem.problems : [{ field: '', message: problem.detail }]

/** A study file as text and as a form, with the server's messages; it is checked and submitted here. */
export function StudyEditor(props: {
  name: string
  start: string
  schemas: Schemas
  session: Session
  /** Called once the study is submitted. */
  onSubmitted: () => void
}) {
  const { name, start, schemas, session, onSubmitted } = props
  const [text, setText, forget] = useDraft(name, start)
  const editor = useRef<Editor>(null)
  const [said] = useDebouncedValue(text, CHECK_AFTER_MS)
  const check = useQuery({
    queryKey: ['check', said],
    queryFn: ({ signal }) => checked(said, 'syntax', signal),
    placeholderData: keepPreviousData,
    staleTime: Infinity,
  })
  const full = useMutation({
    mutationFn: async (content: string) => ({ content, check: await checked(content, 'full') }),
  })
  const submit = useSubmit(() => {
    forget()
    onSubmitted()
  })
  const { ownership, controls } = useOwnership(session)
  const { content, error } = useMemo(() => parsed(text), [text])

  const ofFull = full.data?.content === text ? full.data.check.problems : []
  const ofSubmit = submit.refused?.content === text ? submit.refused.problems : []
  const problems = unique([...(check.data?.problems ?? []), ...ofFull, ...ofSubmit])
  const form: Form = {
    schemas,
    root: schemas.Study ?? {},
    content,
    errorOf: (field) => problems.find((problem) => problem.field === field)?.message,
    change: (edit) => setText((before) => edit(before)),
  }
  const jump = ({ field }: FieldProblem) => {
    const element = document.getElementById(idOf(field))
    element?.closest('details')?.setAttribute('open', '')
    if (element) element.focus()
    else editor.current?.select(rangeOf(text, pathOf(field)))
  }
  const lineOf = (field: string) => text.slice(0, rangeOf(text, pathOf(field))[0]).split('\n').length - 1
  const marked = new Set(problems.map(({ field }) => lineOf(field)))
  const isCurrent = said === text && !check.isFetching
  return (
    <div className="halves">
      <section aria-label="Form">
        <h2>Form</h2>
        {error === undefined ? (
          <ModelsOffered>
            <StudyForm form={form} />
          </ModelsOffered>
        ) : (
          <p>The form follows when the text is YAML again: {error.message.split('\n')[0]}</p>
        )}
      </section>
      <div className="beside">
        <section aria-label="Text">
          <div className="row">
            <h2>Text</h2>
            {text !== start && (
              <Button variant="subtle" size="compact-xs" onClick={() => setText(start)}>
                Begin again
              </Button>
            )}
          </div>
          <TextEditor text={text} onChange={setText} marked={marked} editor={editor} />
        </section>
        <section aria-labelledby="check">
          <h2 id="check">Check</h2>
          {check.isError && <Failure error={check.error} retry={() => check.refetch()} />}
          <p role="status" data-testid="check">
            {!isCurrent
              ? 'Checking'
              : check.data === undefined
                ? ''
                : problems.length === 0
                  ? '✓ The file has no problem that is seen without models and tasks.'
                  : `✕ ${problems.length === 1 ? '1 problem' : `${problems.length} problems`}`}
          </p>
          <ul id="problems">
            {problems.map((problem) => (
              <li key={`${problem.field} ${problem.message}`}>
                <button type="button" className="link" onClick={() => jump(problem)}>
                  {problem.field || `line ${lineOf('') + 1}`}
                </button>
                : {problem.message}
              </li>
            ))}
          </ul>
          <Button variant="default" loading={full.isPending} onClick={() => full.mutate(text)}>
            Check models and tasks
          </Button>
          {full.isError && <Failure error={full.error} retry={() => full.mutate(text)} />}
          {full.data?.check.plan && <Plan plan={full.data.check.plan} isOld={full.data.content !== text} />}
        </section>
        <section aria-labelledby="submit">
          <h2 id="submit">Submit</h2>
          <div className="row">
            {controls}
            <Button loading={submit.isPending} onClick={() => submit.send({ content: text, ...ownership })}>
              Submit
            </Button>
          </div>
          {submit.error && <Failure error={submit.error} />}
        </section>
      </div>
    </div>
  )
}

interface Sent extends Ownership {
  content: string
}

/** Submits a study: once for each content, however often it is asked to, and goes to the study. */
function useSubmit(forget: () => void) {
  const client = useQueryClient()
  const navigate = useNavigate()
  const key = useRef({ of: '', value: '' })
  const mutation = useMutation({
    mutationFn: async ({ content, team, sharing }: Sent) => {
      const of = JSON.stringify([content, team, sharing])
      if (key.current.of !== of) key.current = { of, value: randomKey() }
      const params = { query: { team, sharing }, header: { 'Idempotency-Key': key.current.value } }
      return (await api.POST('/v1/studies', { params, headers: HEADERS, ...asText(content) })).data!
    },
    onSuccess: ({ id }) => {
      forget()
      client.invalidateQueries({ queryKey: ['studies'] })
      navigate({ to: '/studies/$id', params: { id } })
    },
  })
  const { error, variables } = mutation
  const refused =
    error instanceof Refused && variables ? { content: variables.content, problems: problemsOf(error) } : null
  return { send: mutation.mutate, isPending: mutation.isPending, error, refused }
}

/** A new idempotency key. `crypto.randomUUID` needs HTTPS. */
const randomKey = () => [...crypto.getRandomValues(new Uint8Array(16))].map((byte) => byte.toString(16)).join('-')

const unique = (problems: FieldProblem[]) => [
  ...new Map(problems.map((problem) => [`${problem.field} ${problem.message}`, problem])).values(),
]
