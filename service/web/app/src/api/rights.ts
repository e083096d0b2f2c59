/** What a session may do with jobs; the server decides, and a page leaves out what the user may not do. */
import { useQuery } from '@tanstack/react-query'
import { session } from './queries'
import { rightsOf } from './session'
import type { Session, Study } from './types'

/** What a user may do with a job: "use" (export and serve its models), "change" (everything else). */
export type RightName = Study['rights'][number]

type Owned = Pick<Study, 'rights'>

/** Whether the session may submit jobs. */
export const maySubmit = (given: Session | undefined): boolean => given !== undefined && rightsOf(given).submits

/** Whether the session may do something with a job, whose `rights` are those of the user. */
export const may = (given: Session | undefined, job: Owned, right: RightName): boolean =>
  maySubmit(given) && job.rights.includes(right)

export const useMay = (job: Owned, right: RightName): boolean => may(useQuery(session).data, job, right)

export const useMaySubmit = (): boolean => maySubmit(useQuery(session).data)

/** Teams for which the user may submit jobs. */
export const teamsOf = (given: Session): string[] =>
  Object.entries(given.user?.teams ?? {})
    .filter(([, role]) => role !== 'viewer')
    .map(([team]) => team)
    .toSorted()
