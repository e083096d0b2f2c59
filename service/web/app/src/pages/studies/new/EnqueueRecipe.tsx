import { Button, TextInput } from '@mantine/core'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { Link, useNavigate } from '@tanstack/react-router'
import { useState } from 'react'
import { api } from '../../../api/client'
import { may } from '../../../api/rights'
import type { Session } from '../../../api/types'
import { Answer, Failure, Nothing } from '../../../parts/Answer'
import { StudyPicker, studiesToChoose } from '../../../parts/StudyPicker'

/** The recipe of a trial, given as ID/TRIAL, to be evaluated by a study as a new trial at the full budget. */
export function EnqueueRecipe({ recipe, session }: { recipe: string; session: Session }) {
  const [id = '', number = ''] = recipe.split('/')
  const content = useQuery({
    queryKey: ['study', id, 'recipe', number],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: id, number: Number(number) } }
      return (await api.GET('/v1/studies/{study_id}/trials/{number}/recipe', { params, signal })).data!
    },
  })
  const studies = useQuery(studiesToChoose)
  return (
    <>
      <p>
        The merge of{' '}
        <Link to="/studies/$id/trials/$number" params={{ id, number }}>
          trial {number}
        </Link>{' '}
        becomes a trial of the study that you choose, with the origin user. It is evaluated at the full budget, and does
        not count towards max_trials. A study that is complete continues.
      </p>
      <Answer of={content}>
        {(found) => (
          <Answer of={studies}>
            {(all) => {
              const own = all.filter((study) => may(session, study, 'change'))
              if (own.length === 0) return <Nothing>There is no study to which you may add a trial.</Nothing>
              const first = own.find((study) => study.id === id) ?? own[0]!
              return <Enqueue recipe={found} label={`trial ${number}`} first={first.id} session={session} />
            }}
          </Answer>
        )}
      </Answer>
    </>
  )
}

function Enqueue(props: { recipe: Record<string, unknown>; label: string; first: string; session: Session }) {
  const { recipe, first, session } = props
  const [study, setStudy] = useState(first)
  const [label, setLabel] = useState(props.label)
  const [reason, setReason] = useState('')
  const client = useQueryClient()
  const navigate = useNavigate()
  const enqueue = useMutation({
    mutationFn: async () => {
      const body = { label, recipe, ...(reason && { reason }) }
      await api.POST('/v1/studies/{study_id}/trials', { params: { path: { study_id: study } }, body })
    },
    onSuccess: () => {
      client.invalidateQueries({ queryKey: ['study', study] })
      navigate({ to: '/studies/$id/trials', params: { id: study }, search: { origin: 'user' } })
    },
  })
  return (
    <form
      className="form"
      style={{ maxWidth: 480 }}
      onSubmit={(event) => {
        event.preventDefault()
        enqueue.mutate()
      }}
    >
      <StudyPicker
        label="study"
        description="It must have the models of the recipe."
        value={study}
        isOffered={(each) => may(session, each, 'change')}
        onChange={(id) => setStudy(id!)}
      />
      <TextInput label="label" required value={label} onChange={(event) => setLabel(event.currentTarget.value)} />
      <TextInput
        label="reason"
        description="Shown in the events of the study."
        maxLength={500}
        value={reason}
        onChange={(event) => setReason(event.currentTarget.value)}
      />
      {enqueue.isError && <Failure error={enqueue.error} />}
      <Button type="submit" loading={enqueue.isPending} style={{ justifySelf: 'start' }}>
        Enqueue
      </Button>
    </form>
  )
}
