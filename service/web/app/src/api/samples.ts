/** Samples of one trial, or of two side by side. */
import { infiniteQueryOptions, keepPreviousData } from '@tanstack/react-query'
import { api } from './client'
import type { paths } from './schema'

const PATH = '/v1/studies/{study_id}/trials/{number}/samples'

type Query = NonNullable<paths[typeof PATH]['get']['parameters']['query']>

export const SPLITS = ['search', 'holdout', 'bench'] as const
export const KEPT = ['differs', 'a_only', 'b_only', 'both_wrong'] as const
export type Split = NonNullable<Query['split']>
export type Kept = NonNullable<Query['only']>

/** The chosen samples of a trial, page by page. Counts and difference are over all of them, on every page. */
export const samples = (id: string, number: number, chosen: Omit<Query, 'after'>) =>
  infiniteQueryOptions({
    queryKey: ['study', id, 'samples', number, chosen],
    queryFn: async ({ pageParam: after, signal }) => {
      const params = { path: { study_id: id, number }, query: { ...chosen, after } }
      return (await api.GET(PATH, { params, signal })).data!
    },
    initialPageParam: undefined as number | undefined,
    getNextPageParam: (last) => (last.next === null ? undefined : last.samples.at(-1)?.position),
    placeholderData: keepPreviousData,
  })

/** Whether a text of the address is one of `known`. */
export const oneOf = <T extends string>(known: readonly T[], text: string | undefined): T | undefined =>
  known.find((each) => each === text)

/** The number of a trial in an address; undefined for any other text. */
export const trialNumber = (text: string | undefined): number | undefined =>
  text !== undefined && /^\d{1,9}$/.test(text.trim()) ? Number(text) : undefined
