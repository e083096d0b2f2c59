import { NativeSelect, Radio, Stack } from '@mantine/core'
import { useState } from 'react'
import { shownOf, useChange } from '../../../api/change'
import { api } from '../../../api/client'
import { teamsOf } from '../../../api/rights'
import type { Session, Study } from '../../../api/types'
import { Dialog } from '../../../parts/Dialog'

const SHARING = [
  { value: 'private', label: 'private: its owner and administrators' },
  { value: 'team', label: 'team: also the members of its team' },
  { value: 'all', label: 'all: every user of the server' },
] as const

type Sharing = Study['sharing']

/** Changes who may read a study, and the team that it belongs to. */
export function ShareDialog(props: { study: Study; session: Session; onClose: () => void }) {
  const { study, session, onClose } = props
  const [sharing, setSharing] = useState<Sharing>(study.sharing)
  const [team, setTeam] = useState(study.team)
  const change = useChange(
    (body: { sharing: Sharing; team?: string | null }) =>
      api.PUT('/v1/studies/{study_id}/sharing', { params: { path: { study_id: study.id } }, body }),
    shownOf(study),
    onClose,
  )
  const own = teamsOf(session)
  const teams = [...new Set([...(study.team ? [study.team] : []), ...own])].toSorted()
  // Only administrators of the server take a study out of its team.
  const canBeNone = study.team === null || session.user?.is_admin
  return (
    <Dialog
      title={`Share ${study.name}`}
      action="Share"
      isPending={change.isPending}
      error={change.error}
      send={() => change.mutate({ sharing, ...(team !== study.team && { team }) })}
      onClose={onClose}
    >
      <Radio.Group label="Who may read it" value={sharing} onChange={(chosen) => setSharing(chosen as Sharing)}>
        <Stack gap={6} mt={6}>
          {SHARING.map(({ value, label }) => (
            <Radio key={value} value={value} label={label} />
          ))}
        </Stack>
      </Radio.Group>
      {teams.length > 0 && (
        <NativeSelect
          label="team"
          data={[...(canBeNone ? [{ value: '', label: 'none' }] : []), ...teams]}
          value={team ?? ''}
          onChange={(event) => setTeam(event.currentTarget.value || null)}
        />
      )}
    </Dialog>
  )
}
