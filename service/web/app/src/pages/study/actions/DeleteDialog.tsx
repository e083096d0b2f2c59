import { TextInput } from '@mantine/core'
import { useQueryClient } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { useState } from 'react'
import { api } from '../../../api/client'
import type { Study } from '../../../api/types'
import { Dialog, useChange } from './Dialog'

/** Deletes a study when its name is typed, and goes to the list. */
export function DeleteDialog({ study, onClose }: { study: Study; onClose: () => void }) {
  const [typed, setTyped] = useState('')
  const client = useQueryClient()
  const navigate = useNavigate()
  const change = useChange<void>(
    study,
    () => api.DELETE('/v1/studies/{study_id}', { params: { path: { study_id: study.id } } }),
    async () => {
      onClose()
      await navigate({ to: '/studies' })
      client.removeQueries({ queryKey: ['study', study.id] })
    },
  )
  return (
    <Dialog
      title={`Delete ${study.name}`}
      action="Delete"
      isDangerous
      isReady={typed === study.name}
      change={change}
      send={() => change.mutate()}
      onClose={onClose}
    >
      <p style={{ margin: 0 }}>
        The study is deleted with its results, its exports and its files. This cannot be undone.
      </p>
      <TextInput
        label={`Type the study's name, ${study.name}`}
        autoComplete="off"
        value={typed}
        onChange={(event) => setTyped(event.currentTarget.value)}
        data-autofocus
      />
    </Dialog>
  )
}
