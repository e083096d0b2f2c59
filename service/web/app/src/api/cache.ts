/** The answers that the page has, and what happens if a request fails. */
import { MutationCache, QueryCache, QueryClient } from '@tanstack/react-query'
import { Refused } from './client'
import { session } from './queries'
import { afterFailure, isRefused } from './retry'

/** After a request without a valid session the page is that of nobody; its shell leads to the login. */
function failed(error: Error) {
  if (!(error instanceof Refused)) return
  if (error.problem.status === 401)
    cache.setQueryData(session.queryKey, (old) => old && { ...old, has_accounts: true, user: null, scope: null })
  // Another tab may have another session since.
  if (error.problem.status === 403) cache.invalidateQueries({ queryKey: session.queryKey })
}

export const cache = new QueryClient({
  queryCache: new QueryCache({ onError: failed }),
  mutationCache: new MutationCache({ onError: failed }),
  defaultOptions: {
    // The server may be this machine, which needs no network.
    mutations: { networkMode: 'always' },
    queries: {
      networkMode: 'always',
      staleTime: 10_000,
      retry: (failures, error) => failures < 2 && !isRefused(error),
      refetchInterval: ({ state }) => afterFailure(state),
    },
  },
})
