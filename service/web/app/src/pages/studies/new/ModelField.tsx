import { Autocomplete } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { createContext, useContext } from 'react'
import { api } from '../../../api/client'
import type { components } from '../../../api/schema'
import { bytes } from '../../../format'

type Model = components['schemas']['SourceModelDocument']

/** The models that jobs may use, for all fields of a form; adapters are offered for experts only. */
const Models = createContext<readonly Model[]>([])

export function ModelsOffered({ children }: { children: React.ReactNode }) {
  const models = useQuery({
    queryKey: ['models'],
    queryFn: async ({ signal }) => (await api.GET('/v1/models', { signal })).data!.models,
    staleTime: 60_000,
  })
  return <Models value={models.data ?? []}>{children}</Models>
}

/** A directory or hub id of a model; directories that the server has are offered while it is written. */
export function ModelField(props: {
  id: string
  label: string
  description?: string
  error?: string
  isBase?: boolean
  value: string
  onChange: (text: string) => void
  onFocus?: () => void
  onBlur?: () => void
}) {
  const { isBase, ...own } = props
  const models = useContext(Models).filter(({ is_adapter }) => !isBase || !is_adapter)
  const byPath = new Map(models.map((model) => [model.path, model]))
  return (
    <Autocomplete
      {...own}
      data={[...byPath.keys()]}
      limit={50}
      autoComplete="off"
      spellCheck={false}
      comboboxProps={{ transitionProps: { duration: 0 } }}
      renderOption={({ option }) => {
        const model = byPath.get(option.value)
        return (
          <span style={{ overflowWrap: 'anywhere' }}>
            {option.value}
            {model && (
              <small className="soft" style={{ display: 'block' }}>
                {model.is_adapter ? 'LoRA adapter' : model.architecture}, {bytes(model.bytes)}
              </small>
            )}
          </span>
        )
      }}
    />
  )
}
