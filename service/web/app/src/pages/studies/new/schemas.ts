import { BASE } from '../../../api/client'
import type { Schemas } from './schema'

/** The schemas of study files and of fine-tunings, from the server's OpenAPI document. */
export const schemasQuery = {
  queryKey: ['openapi'],
  queryFn: async ({ signal }: { signal: AbortSignal }): Promise<Schemas> => {
    const found = await fetch(`${BASE}/openapi.json`, { signal })
    if (!found.ok) throw new Error(`the schema of study files: ${found.status} ${found.statusText}`)
    return (await found.json()).components.schemas
  },
  staleTime: Infinity,
}
