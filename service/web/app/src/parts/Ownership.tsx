import { type ReactNode, useState } from 'react'
import { teamsOf } from '../api/rights'
import type { Session } from '../api/types'
import { Choose } from './Choose'

const SHARING = [
  { value: 'team', label: 'its team may read it' },
  { value: 'private', label: 'only its owner may read it' },
  { value: 'all', label: 'all users may read it' },
] as const

/** The team of a new job, and who may read it besides its owner; neither at a server without accounts. */
export interface Ownership {
  team?: string
  sharing?: (typeof SHARING)[number]['value']
}

/** The ownership that a user chooses for a new job, and the controls to choose it. */
export function useOwnership(session: Session): { ownership: Ownership; controls: ReactNode } {
  const teams = teamsOf(session)
  const [team, setTeam] = useState(teams[0])
  const [sharing, setSharing] = useState<Ownership['sharing']>('team')
  if (session.user === null) return { ownership: {}, controls: null }
  const controls = (
    <>
      {teams.length > 1 && <Choose label="Team" options={teams} value={team} onChange={setTeam} />}
      <Choose
        label="Sharing"
        options={SHARING}
        value={sharing}
        onChange={(chosen) => setSharing(chosen as Ownership['sharing'])}
      />
    </>
  )
  return { ownership: { team, sharing }, controls }
}
