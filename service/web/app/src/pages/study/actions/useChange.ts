import { useMutation, useQueryClient } from '@tanstack/react-query'
import type { Study } from '../../../api/types'

/** A request that changes a study; afterwards what is shown of it is read again. */
export function useChange<T>(study: Study, request: (given: T) => Promise<unknown>, onDone: () => unknown) {
  const client = useQueryClient()
  return useMutation<unknown, Error, T>({
    mutationFn: request,
    onSuccess: async () => {
      await onDone()
      await Promise.all([
        client.invalidateQueries({ queryKey: ['study', study.id] }),
        client.invalidateQueries({ queryKey: ['studies'] }),
      ])
    },
  })
}
