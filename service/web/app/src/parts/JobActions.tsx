import { Button } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { type ReactNode, useState } from 'react'
import { api } from '../api/client'
import { useMay } from '../api/rights'
import type { Study } from '../api/types'
import { Failure } from './Answer'
import { Confirm } from './Confirm'

type Verb = 'pause' | 'resume' | 'cancel'

/** Kinds of jobs: the noun for one, and the page that is left for when it is deleted. */
const KINDS = {
  finetune: { noun: 'fine-tuning', list: '/finetunes' },
  serving: { noun: 'served study', list: '/studies' },
} as const

type Kind = keyof typeof KINDS
type Job = Pick<Study, 'id' | 'name' | 'state' | 'rights'>

/** Verbs that the server accepts in each state of a job. */
const VERBS: Record<Study['state'], readonly (Verb | 'delete')[]> = {
  CREATED: ['pause', 'cancel'],
  RUNNING: ['pause', 'cancel'],
  STOPPED: ['pause', 'cancel'],
  PAUSED: ['resume', 'cancel'],
  COMPLETE: ['delete'],
  FAILED: ['resume', 'delete'],
  CANCELLED: ['delete'],
}

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
  const act = useMutation({
    mutationFn: (verb: Verb | 'delete') => send(kind, job.id, verb),
    onSuccess: async (_, verb) => {
      setAsked(undefined)
      if (verb === 'delete') {
        await navigate({ to: list })
        client.removeQueries({ queryKey })
      } else await client.invalidateQueries({ queryKey })
    },
  })
  const close = () => {
    setAsked(undefined)
    act.reset()
  }
  return (
    <>
      <div className="row">
        {mayChange &&
          VERBS[job.state].map((verb) => (
            <Button
              key={verb}
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
