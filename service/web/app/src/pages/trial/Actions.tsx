import { Button, TextInput } from '@mantine/core'
import { Link } from '@tanstack/react-router'
import { type FormEvent, type ReactNode, useState } from 'react'
import { useChange } from '../../api/change'
import { api } from '../../api/client'
import { useMay, useMaySubmit } from '../../api/rights'
import type { ShownTrial, Study } from '../../api/types'
import { Failure } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { DTYPES, ExportButton, type ExportRequest } from '../../parts/ExportButton'

/** What can be done with the trial, by the verbs of API and commands; what the user may not do is absent. */
export function Actions({ study, trial }: { study: Study; trial: ShownTrial }) {
  const canSubmit = useMaySubmit()
  const canUse = useMay(study, 'use')
  const canChange = useMay(study, 'change')
  if (!canSubmit) return null
  const isEvaluated = trial.state === 'PRUNED' || trial.state === 'FAIL'
  return (
    <section aria-label="Actions" className="actions">
      {canUse && study.state === 'COMPLETE' && <ExportTrial study={study} trial={trial} />}
      {canUse && <Serve study={study} trial={trial} />}
      <Enqueue study={study} trial={trial} />
      {canChange && isEvaluated && <Evaluate study={study} trial={trial} />}
      {canChange && <Validity study={study} trial={trial} />}
    </section>
  )
}

interface Of {
  study: Study
  trial: ShownTrial
}

function ExportTrial({ study, trial }: Of) {
  const [dtype, setDtype] = useState<string>()
  const request = { trial: trial.number, dtype } as ExportRequest
  return (
    <div>
      <div className="row">
        <Choose
          label="dtype of the export"
          any="dtype of the engines"
          options={DTYPES}
          value={dtype}
          onChange={setDtype}
        />
        <ExportButton study={study} label="Export" request={request} />
      </div>
    </div>
  )
}

/** An action that refetches the study's data. */
const useAction = <T,>(study: Study, send: () => Promise<T>) => useChange<void, T>(send, [['study', study.id]])

/** The button of an action, what it says afterwards, and its failure. */
function Action<T>(props: {
  verb: string
  action: ReturnType<typeof useAction<T>>
  /** The button submits the form that it is in, which checks its fields. */
  isSubmit?: boolean
  children?: (done: T) => ReactNode
}) {
  const { verb, action, isSubmit, children } = props
  return (
    <>
      <Button
        size="xs"
        variant="default"
        loading={action.isPending}
        type={isSubmit ? 'submit' : 'button'}
        onClick={isSubmit ? undefined : () => action.mutate()}
      >
        {verb}
      </Button>
      <span role="status">{action.data !== undefined && children?.(action.data)}</span>
      {action.error && <Failure error={action.error} />}
    </>
  )
}

function Serve({ study, trial }: Of) {
  const serve = useAction(study, async () => {
    const params = { path: { study_id: study.id, number: trial.number } }
    return (await api.POST('/v1/studies/{study_id}/trials/{number}:serve', { params })).data!
  })
  return (
    <div className="row">
      <Action verb="Serve" action={serve}>
        {(served) => (
          <Link to="/served/$id" params={{ id: served.id }} search={{ trials: served.model }}>
            Chat with trial {served.model}
          </Link>
        )}
      </Action>
    </div>
  )
}

/** Link to the form by which another study, or this one, continues with the trial's merge. */
function Enqueue({ study, trial }: Of) {
  return (
    <Link to="/studies/new" search={{ recipe: `${study.id}/${trial.number}` }}>
      Enqueue in a study
    </Link>
  )
}

function Evaluate({ study, trial }: Of) {
  const evaluate = useAction(study, async () => {
    const params = { path: { study_id: study.id, number: trial.number } }
    return (await api.POST('/v1/studies/{study_id}/trials/{number}:evaluate', { params })).data!
  })
  return (
    <div className="row">
      <Action verb="Evaluate at full budget" action={evaluate}>
        {() => 'Requested: a new trial with this recipe is scored on all samples.'}
      </Action>
    </div>
  )
}

function Validity({ study, trial }: Of) {
  const [reason, setReason] = useState('')
  const isValid = trial.invalid === null
  const mark = useAction(study, async () => {
    const params = { path: { study_id: study.id, number: trial.number } }
    const body = { is_valid: !isValid, reason: reason || null }
    const marked = (await api.PUT('/v1/studies/{study_id}/trials/{number}/validity', { params, body })).data!
    setReason('')
    return marked.invalid === null
  })
  const submit = (event: FormEvent) => {
    event.preventDefault()
    mark.mutate()
  }
  return (
    <form className="row" onSubmit={submit}>
      <TextInput
        size="xs"
        aria-label="Reason"
        placeholder={isValid ? 'why the trial is invalid' : 'why it is valid again'}
        value={reason}
        required={isValid}
        maxLength={500}
        onChange={(event) => setReason(event.currentTarget.value)}
      />
      <Action verb={isValid ? 'Invalidate' : 'Mark as valid'} action={mark} isSubmit>
        {(valid) => (valid ? 'The trial is valid.' : 'The trial is invalid.')}
      </Action>
    </form>
  )
}
