import { TextInput } from '@mantine/core'
import { useState } from 'react'
import { shownOf, useChange } from '../../../api/change'
import { api } from '../../../api/client'
import type { Study } from '../../../api/types'
import { Dialog } from '../../../parts/Dialog'
import type { Verb } from '../../../api/verbs'

/** Asks for the reason of a pause, resume, stop or cancel, and says what it does. */
export function VerbDialog({ study, verb, onClose }: { study: Study; verb: Verb; onClose: () => void }) {
  const [reason, setReason] = useState('')
  const { name, says } = verb
  const change = useChange(
    (given: string) => {
      const params = { path: { study_id: study.id }, query: { reason: given.trim() || undefined } }
      return api.POST(`/v1/studies/{study_id}:${name}`, { params })
    },
    shownOf(study),
    onClose,
  )
  const word = name[0]!.toUpperCase() + name.slice(1)
  return (
    <Dialog
      title={`${word} ${study.name}`}
      action={word}
      isDangerous={name === 'cancel'}
      isPending={change.isPending}
      error={change.error}
      send={() => change.mutate(reason)}
      onClose={onClose}
    >
      <p style={{ margin: 0 }}>{says}</p>
      <TextInput
        label="reason"
        description="Not required; shown in the events of the study."
        maxLength={500}
        value={reason}
        onChange={(event) => setReason(event.currentTarget.value)}
        data-autofocus
      />
    </Dialog>
  )
}
