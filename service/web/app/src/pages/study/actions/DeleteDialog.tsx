import { useQueryClient } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { useChange } from '../../../api/change'
import { api } from '../../../api/client'
import type { Study } from '../../../api/types'
import { Confirm } from '../../../parts/Confirm'

/** Deletes a study when its name is typed, and goes to the list. */
export function DeleteDialog({ study, onClose }: { study: Study; onClose: () => void }) {
  const client = useQueryClient()
  const navigate = useNavigate()
  const change = useChange(
    () => api.DELETE('/v1/studies/{study_id}', { params: { path: { study_id: study.id } } }),
    [['studies']],
    async () => {
      onClose()
      await navigate({ to: '/studies' })
      client.removeQueries({ queryKey: ['study', study.id] })
    },
  )
  return (
    <Confirm
      title={`Delete ${study.name}`}
      verb="Delete"
      name={study.name}
      isPending={change.isPending}
      error={change.error}
      onConfirm={() => change.mutate()}
      onClose={onClose}
    >
      The study is deleted with its results, its exports and its files. This cannot be undone.
    </Confirm>
  )
}
