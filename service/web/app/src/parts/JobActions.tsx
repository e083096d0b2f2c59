import { Button } from '@mantine/core'
import { useQueryClient } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { type ReactNode, useState } from 'react'
import { useChange } from '../api/change'
import { api } from '../api/client'
import { useMay } from '../api/rights'
import type { Study } from '../api/types'
import { isFinished } from '../api/jobs'
import { type Steered, VERBS, type VerbName } from '../api/verbs'
import { Failure } from './Answer'
import { Confirm } from './Confirm'
import { useKeptFocus } from './useKeptFocus'

// Searches alone are stopped early.
type Verb = Exclude<VerbName, 'stop'>

/** Kinds of jobs: the noun for one, and the page that is left for when it is deleted. */
const KINDS = {
  finetune: { noun: 'fine-tuning', list: '/finetunes' },
  serving: { noun: 'served study', list: '/studies' },
} as const

type Kind = keyof typeof KINDS
type Job = Steered & Pick<Study, 'id' | 'name' | 'rights'>

const WORDS = { pause: 'Pause', resume: 'Resume', cancel: 'Cancel', delete: 'Delete' }

async function send(kind: Kind, id: string, verb: Verb | 'delete') {
  if (kind === 'finetune') {
    const params = { path: { finetune_id: id } }
    if (verb === 'delete') await api.DELETE('/v1/finetunes/{finetune_id}', { params })
    else await api.POST(`/v1/finetunes/{finetune_id}:${verb}`, { params })
  } else {
    const params = { path: { served_id: id } }
    if (verb === 'delete') await api.DELETE('/v1/served/{served_id}', { params })
    else await api.POST(`/v1/served/{served_id}:${verb}`, { params })
  }
}

/** Verbs that the server accepts in the state of a job. */
function permitted(job: Job): (Verb | 'delete')[] {
  const verbs = VERBS.filter(({ isPermitted }) => isPermitted(job)).map(({ name }) => name)
  return [...verbs.filter((name) => name !== 'stop'), ...(isFinished(job) ? (['delete'] as const) : [])]
}

/**
 * Buttons that pause, resume, cancel and delete a job: those that its state allows, for users who may change it.
 * `cancelled` and `deleted` say what happens then. Queries whose key begins with `queryKey` are refetched.
 */
export function JobActions(props: {
  kind: Kind
  job: Job
  queryKey: readonly unknown[]
  cancelled: ReactNode
  deleted: ReactNode
  children?: ReactNode
}) {
  const { kind, job, queryKey, cancelled, deleted, children } = props
  const { noun, list } = KINDS[kind]
  const mayChange = useMay(job, 'change')
  const client = useQueryClient()
  const navigate = useNavigate()
  const [asked, setAsked] = useState<'cancel' | 'delete'>()
  const act = useChange(
    (verb: Verb | 'delete') => send(kind, job.id, verb),
    [queryKey],
    async (_, verb) => {
      setAsked(undefined)
      if (verb !== 'delete') return
      await navigate({ to: list })
      client.removeQueries({ queryKey })
    },
  )
  const row = useKeptFocus<HTMLDivElement>()
  const close = () => {
    setAsked(undefined)
    act.reset()
  }
  return (
    <>
      <div className="row" {...row}>
        {mayChange &&
          permitted(job).map((verb) => (
            <Button
              key={verb}
              data-place={verb === 'resume' ? 'pause' : verb}
              size="xs"
              variant="default"
              disabled={act.isPending}
              onClick={() => (verb === 'cancel' || verb === 'delete' ? setAsked(verb) : act.mutate(verb))}
            >
              {WORDS[verb]}
            </Button>
          ))}
        {children}
      </div>
      {act.error && asked === undefined && <Failure error={act.error} />}
      {asked !== undefined && (
        <Confirm
          title={`${WORDS[asked]} the ${noun} ${job.name}`}
          verb={WORDS[asked]}
          name={asked === 'delete' ? job.name : undefined}
          isPending={act.isPending}
          error={act.error}
          onConfirm={() => act.mutate(asked)}
          onClose={close}
        >
          {asked === 'cancel' ? cancelled : deleted}
        </Confirm>
      )}
    </>
  )
}
