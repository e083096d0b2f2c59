import { Button, TagsInput, TextInput, Textarea } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useState } from 'react'
import { shownOf, useChange } from '../../../api/change'
import { api, Refused } from '../../../api/client'
import { sentenceOf } from '../eventSentence'
import { isFinished } from '../../../api/jobs'
import type { Study, StudyEvent } from '../../../api/types'
import { Answer, Failure } from '../../../parts/Answer'
import { Dialog } from '../../../parts/Dialog'

/** What may be edited, as the texts of its inputs. */
interface Edited {
  name: string
  description: string
  notes: string
  tags: string[]
  priority: string
  max_trials: string
  replicas: string
  max_samples: string
  max_gpu_hours: string
  max_wall_clock_s: string
}

const LIMITS = ['max_samples', 'max_gpu_hours', 'max_wall_clock_s'] as const

async function read(id: string, signal: AbortSignal) {
  const params = { path: { study_id: id } }
  const [study, file] = await Promise.all([
    api.GET('/v1/studies/{study_id}', { params, signal }),
    api.GET('/v1/studies/{study_id}/study', { params, signal }),
  ])
  return { study: study.data!, file: file.data! }
}

type Read = Awaited<ReturnType<typeof read>>

const text = (value: unknown) => (value === null || value === undefined ? '' : String(value))

function textsOf({ study, file }: Read): Edited {
  const { name, tags, priority } = study
  return {
    name,
    description: text(study.description),
    notes: text(study.notes),
    tags,
    priority: text(priority),
    max_trials: text(file.search?.max_trials),
    replicas: text(file.engine?.replicas),
    max_samples: text(file.limits?.max_samples),
    max_gpu_hours: text(file.limits?.max_gpu_hours),
    max_wall_clock_s: text(file.limits?.max_wall_clock_s),
  }
}

/** A number; other texts are sent as they are, so that the server says what is wrong with them. */
const number = (given: string) => (given.trim() === '' || Number.isNaN(Number(given)) ? given : Number(given))

/** The body of the edit: only what was changed. */
function bodyOf(before: Edited, after: Edited): Record<string, unknown> {
  const body: Record<string, unknown> = {}
  const isChanged = (key: keyof Edited) => JSON.stringify(before[key]) !== JSON.stringify(after[key])
  for (const key of ['name', 'tags'] as const) if (isChanged(key)) body[key] = after[key]
  for (const key of ['description', 'notes'] as const) if (isChanged(key)) body[key] = after[key] || null
  for (const key of ['priority', 'max_trials', 'replicas'] as const) if (isChanged(key)) body[key] = number(after[key])
  const limits = LIMITS.filter(isChanged).map((key) => [key, after[key].trim() === '' ? null : number(after[key])])
  if (limits.length > 0) body.limits = Object.fromEntries(limits)
  return body
}

/** Edits a study as it was when the dialog was opened; an edit of somebody else meanwhile is not overwritten. */
export function EditDialog({ study, onClose }: { study: Study; onClose: () => void }) {
  const [times, setTimes] = useState(0)
  const query = useQuery({
    queryKey: ['edit', study.id, times],
    queryFn: ({ signal }) => read(study.id, signal),
    staleTime: Infinity,
    gcTime: 0,
  })
  if (query.data === undefined) return query.isError ? <Failure error={query.error} /> : null
  return <Fields key={times} read={query.data} again={() => setTimes(times + 1)} onClose={onClose} />
}

function Fields({ read: found, again, onClose }: { read: Read; again: () => void; onClose: () => void }) {
  const { study } = found
  const before = textsOf(found)
  const [after, setAfter] = useState(before)
  const change = useChange(
    (body: Record<string, unknown>) => {
      const header = { 'If-Match': `"${study.version}"` }
      return api.PATCH('/v1/studies/{study_id}', {
        params: { path: { study_id: study.id }, header },
        body: body as never,
      })
    },
    shownOf(study),
    onClose,
  )
  const body = bodyOf(before, after)
  const put = (key: keyof Edited) => ({
    id: `edit-${key}`,
    label: key,
    value: after[key] as string,
    error: problemOf(change.error, LIMITS.includes(key as 'max_samples') ? `limits.${key}` : key),
    onChange: (event: { currentTarget: { value: string } }) => {
      const { value } = event.currentTarget
      setAfter((now) => ({ ...now, [key]: value }))
    },
  })
  const isOutdated = change.error instanceof Refused && change.error.problem.status === 412
  return (
    <Dialog
      title={`Edit ${study.name}`}
      action="Edit"
      isReady={Object.keys(body).length > 0}
      isPending={change.isPending}
      error={change.error}
      send={() => change.mutate(body)}
      onClose={onClose}
      failure={isOutdated ? <Meanwhile study={study} again={again} /> : undefined}
    >
      <TextInput {...put('name')} data-autofocus />
      <TextInput {...put('description')} description="What the study is for." />
      <TagsInput
        label="tags"
        description="Words to find it by: Enter ends each."
        value={after.tags}
        error={problemOf(change.error, 'tags')}
        onChange={(tags) => setAfter((now) => ({ ...now, tags }))}
      />
      <Textarea {...put('notes')} description="What was learned from it." autosize minRows={2} />
      <TextInput
        {...put('priority')}
        inputMode="numeric"
        description="Waiting studies with a larger one start first; above 0 is for administrators."
      />
      {(!isFinished(study) || study.state === 'FAILED') && (
        <>
          <p className="soft" style={{ margin: 0 }}>
            The following take effect at once: the driver stores the samples that are being scored, and the next one
            continues with the new options.
          </p>
          <TextInput {...put('max_trials')} inputMode="numeric" />
          <TextInput {...put('replicas')} inputMode="numeric" />
          <TextInput {...put('max_samples')} inputMode="numeric" placeholder="no limit" />
          <TextInput {...put('max_gpu_hours')} inputMode="decimal" placeholder="no limit" />
          <TextInput {...put('max_wall_clock_s')} inputMode="decimal" placeholder="no limit" />
        </>
      )}
    </Dialog>
  )
}

const problemOf = (error: Error | null, field: string) =>
  error instanceof Refused ? error.problem.problems?.find((problem) => problem.field === field)?.message : undefined

/** Who has edited the study since the dialog was opened, and a way to begin again. */
function Meanwhile({ study, again }: { study: Study; again: () => void }) {
  const events = useQuery({
    queryKey: ['study', study.id, 'edits', study.version],
    queryFn: async ({ signal }) => {
      const query = { kind: ['steered'], after: study.last_event_id, order: 'newest' as const, limit: 100 }
      const params = { path: { study_id: study.id }, query }
      const headers = { Accept: 'application/json' }
      return (await api.GET('/v1/studies/{study_id}/events', { params, headers, signal })).data! as {
        events: StudyEvent[]
      }
    },
  })
  return (
    <div role="alert">
      <Answer of={events}>
        {(found) => {
          const edits = found.events.filter(({ payload }) => payload.action === 'edit')
          return (
            <>
              <p>The study was edited meanwhile, so that this edit was not stored:</p>
              <ul>
                {edits.map((event) => (
                  <li key={event.id}>{sentenceOf(event, study.id)}</li>
                ))}
              </ul>
            </>
          )
        }}
      </Answer>
      <Button variant="default" size="xs" onClick={again}>
        Read it again
      </Button>
    </div>
  )
}
