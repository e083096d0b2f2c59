import { useQuery } from '@tanstack/react-query'
import type { ReactNode } from 'react'
import { api } from '../api/client'
import type { Study } from '../api/types'
import { Answer } from './Answer'
import { Choose } from './Choose'

// Studies in the list to choose from.
const MAX_STUDIES = 200

type Option = { value: string; label: string }

/** The studies that the user may read, newest first, as all pickers list them. */
export const studiesToChoose = {
  queryKey: ['studies', 'to choose from'],
  queryFn: async ({ signal }: { signal: AbortSignal }) => {
    const query = { sort: '-created', limit: MAX_STUDIES } as const
    return (await api.GET('/v1/studies', { params: { query }, signal })).data!.studies
  },
}

/** A choice of a study by its name. */
export function StudyPicker(props: {
  label: string
  /** Whether the label is shown, with a description below it. */
  description?: string
  value: string | undefined
  /** The words for "no study"; without them one is always chosen. */
  any?: string
  /** Choices that are not studies, before them. */
  more?: readonly Option[]
  isOffered?: (study: Study) => boolean
  /** In place of the picker if there is nothing to choose. */
  none?: ReactNode
  onChange: (id: string | undefined) => void
}) {
  const { label, description, value, any, more = [], isOffered = () => true, none, onChange } = props
  const studies = useQuery(studiesToChoose)
  return (
    <Answer of={studies}>
      {(all) => {
        const offered = all.filter(isOffered)
        if (offered.length + more.length === 0 && value === undefined) return none
        const found = offered.map(({ id, name }) => ({ value: id, label: `${name} (${id.slice(0, 8)})` }))
        const known = [...more, ...found]
        const isKnown = value === undefined || known.some((each) => each.value === value)
        return (
          <Choose
            label={label}
            description={description}
            any={any}
            options={isKnown ? known : [{ value, label: value }, ...known]}
            value={value}
            onChange={onChange}
          />
        )
      }}
    </Answer>
  )
}
