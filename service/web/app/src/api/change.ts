/** Requests that change something. */
import { type QueryKey, useMutation, useQueryClient } from '@tanstack/react-query'

/**
 * A request that changes something. Once the server has accepted it, `onDone` runs; then the queries whose keys begin
 * with one of `keys` are requested again.
 */
export function useChange<V, D>(
  request: (given: V) => Promise<D>,
  keys: readonly QueryKey[],
  onDone?: (answer: D, given: V) => unknown,
) {
  const client = useQueryClient()
  return useMutation({
    mutationFn: request,
    onSuccess: async (answer, given) => {
      await onDone?.(answer, given)
      await Promise.all(keys.map((queryKey) => client.invalidateQueries({ queryKey })))
    },
  })
}

/** The keys of what is shown of a study. */
export const shownOf = ({ id }: { id: string }): readonly QueryKey[] => [['study', id], ['studies']]
