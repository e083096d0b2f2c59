/** Queries of the API: each has one key, under which all views share its answer. */
import { queryOptions } from '@tanstack/react-query'
import { api, useCsrfToken } from './client'
import { type TrialColumns, merged } from './columns'
import { isFinished } from './jobs'
import { afterFailure } from './retry'
import type { paths } from './schema'
import type { Columns, Study } from './types'

/** The user, and what the session may do. */
export const session = queryOptions({
  queryKey: ['session'],
  queryFn: async ({ signal }) => {
    const found = (await api.GET('/v1/session', { signal })).data!
    useCsrfToken(found.csrf_token)
    return found
  },
  staleTime: 60_000,
})

const at = (id: string) => ({ params: { path: { study_id: id } } })

/** Milliseconds between requests for a job that runs, which show whether its driver is alive. */
export const RUNNING_MS = 15_000

// A driver that is silent sends no events.
const ofRunning = ({ state }: { state: Parameters<typeof afterFailure>[0] & { data?: Pick<Study, 'state'> } }) =>
  afterFailure(state) || (state.data?.state === 'RUNNING' && RUNNING_MS)

export const study = (id: string) =>
  queryOptions({
    queryKey: ['study', id],
    queryFn: async ({ signal }) => (await api.GET('/v1/studies/{study_id}', { ...at(id), signal })).data!,
    refetchInterval: ofRunning,
  })

/**
 * Columns of every trial, for charts, among them `number`. All trials are loaded once, and then those that have changed
 * since.
 */
export const columns = (id: string, fields = '*') => {
  const queryKey = ['study', id, 'columns', fields]
  return queryOptions({
    queryKey,
    queryFn: async ({ signal, client }) => {
      const known = client.getQueryData<TrialColumns>(queryKey)
      const query = known ? { fields, since: known.event } : { fields }
      const path = '/v1/studies/{study_id}/trials/columns'
      const found = (await api.GET(path, { params: { path: { study_id: id }, query }, signal })).data!
      return merged(known, { ...found, columns: found.columns as Columns })
    },
    structuralSharing: false, // what has not changed is shared already
  })
}

// Trials from whose configurations the names of the parameters are taken; a column of each would be large.
const NAMED_TRIALS = 200

/**
 * Names of the parameters of proposed trials: `names` in the order of the search space, `variedFirst` with those that
 * differ between the first trials at the front.
 */
export const parameterNames = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'parameters'],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: id }, query: { origin: 'search' as const, limit: NAMED_TRIALS } }
      const { trials } = (await api.GET('/v1/studies/{study_id}/trials', { params, signal })).data!
      const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.configuration ?? {})))]
      const distinct = (name: string) =>
        new Set(trials.map(({ configuration }) => JSON.stringify(configuration?.[name])))
      return { names, variedFirst: [...new Set([...names.filter((name) => distinct(name).size > 1), ...names])] }
    },
  })

export const pareto = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'pareto'],
    queryFn: async ({ signal }) => (await api.GET('/v1/studies/{study_id}/pareto', { ...at(id), signal })).data!,
  })

export const summary = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'summary'],
    queryFn: async ({ signal }) => (await api.GET('/v1/studies/{study_id}/summary', { ...at(id), signal })).data!,
  })

export type Plots = paths['/v1/studies/{study_id}/plots/{name}']['get']['responses'][200]['content']['application/json']
type PlotName = Plots['plot']

/** The series of a chart of a study, by the chart's name. */
export const plot = <N extends PlotName>(id: string, name: N) =>
  queryOptions({
    queryKey: ['study', id, 'plots', name],
    queryFn: async ({ signal }) => {
      const path = { study_id: id, name }
      const found = (await api.GET('/v1/studies/{study_id}/plots/{name}', { params: { path }, signal })).data!
      return found as Extract<Plots, { plot: N }>
    },
  })

type StopsQuery = NonNullable<paths['/v1/studies/{study_id}/plots/stops']['get']['parameters']['query']>

/** Stopped trials with the paired differences from their rivals at each rung. */
export const stops = (id: string, query: StopsQuery) =>
  queryOptions({
    queryKey: ['study', id, 'plots', 'stops', query],
    queryFn: async ({ signal }) =>
      (await api.GET('/v1/studies/{study_id}/plots/stops', { params: { path: { study_id: id }, query }, signal }))
        .data!,
  })

/** Paired differences of all trials with held-out values from the trial `reference`, by trial. */
export const heldOutFrom = (id: string, reference: number) =>
  queryOptions({
    queryKey: ['study', id, 'holdout', reference],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: id }, query: { reference } }
      const { rows } = (await api.GET('/v1/studies/{study_id}/holdout', { params, signal })).data!
      return new Map(rows.map((row) => [row.trial, row.differences]))
    },
  })

export const trial = (id: string, number: number) =>
  queryOptions({
    queryKey: ['study', id, 'trial', number],
    queryFn: async ({ signal }) => {
      const path = { study_id: id, number }
      return (await api.GET('/v1/studies/{study_id}/trials/{number}', { params: { path }, signal })).data!
    },
  })

type TrialPlots =
  paths['/v1/studies/{study_id}/trials/{number}/plots/{name}']['get']['responses'][200]['content']['application/json']
type TrialPlotName = TrialPlots['plot']

/** The series of a chart of one trial, by the chart's name. */
export const trialPlot = <N extends TrialPlotName>(id: string, number: number, name: N) =>
  queryOptions({
    queryKey: ['study', id, 'trial', number, 'plots', name],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: id, number, name } }
      const found = (await api.GET('/v1/studies/{study_id}/trials/{number}/plots/{name}', { params, signal })).data!
      return found as Extract<TrialPlots, { plot: N }>
    },
  })

export const recipe = (id: string, number: number) =>
  queryOptions({
    queryKey: ['recipe', id, number], // events of the study do not change it
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: id, number } }
      return (await api.GET('/v1/studies/{study_id}/trials/{number}/recipe', { params, signal })).data!
    },
    staleTime: Infinity,
  })

/** A mergekit configuration of a trial's merge, as text. The server opens the models to write it. */
export const mergekit = (id: string, number: number) =>
  queryOptions({
    queryKey: ['mergekit', id, number], // events of the study do not change it
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: id, number } }
      const path = '/v1/studies/{study_id}/trials/{number}/mergekit'
      return (await api.GET(path, { params, signal, parseAs: 'text' })).data!
    },
    staleTime: Infinity,
  })

/** The study file with every default written out. */
export const studyFile = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'file'],
    queryFn: async ({ signal }) => (await api.GET('/v1/studies/{study_id}/study', { ...at(id), signal })).data!,
  })

// Milliseconds between requests for exports while one is written: a study that has ended sends no events.
const EXPORTS_MS = 1000

export const exports = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'exports'],
    queryFn: async ({ signal }) =>
      (await api.GET('/v1/studies/{study_id}/exports', { ...at(id), signal })).data!.exports,
    refetchInterval: ({ state }) =>
      afterFailure(state) ||
      (state.data?.some((each) => each.state === 'WAITING' || each.state === 'RUNNING') && EXPORTS_MS),
  })

const tuned = (id: string) => ({ params: { path: { finetune_id: id } } })

export const finetune = (id: string) =>
  queryOptions({
    queryKey: ['finetune', id],
    queryFn: async ({ signal }) => (await api.GET('/v1/finetunes/{finetune_id}', { ...tuned(id), signal })).data!,
    refetchInterval: ofRunning,
  })

/** The fine-tuning that has created a study of its experts; null if none has. */
export const finetuneOf = (id: string) =>
  queryOptions({
    queryKey: ['finetunes', 'of', id],
    queryFn: async ({ signal }) => {
      const params = { query: { sort: '-created', limit: 200 } as const }
      const found = (await api.GET('/v1/finetunes', { params, signal })).data!.finetunes
      return found.find((each) => each.links.study?.endsWith(`/${id}`)) ?? null
    },
    staleTime: Infinity,
  })

/** Losses and evaluations of each expert, at most 1000 points a curve. */
export const curves = (id: string) =>
  queryOptions({
    queryKey: ['finetune', id, 'curves'],
    queryFn: async ({ signal }) =>
      (await api.GET('/v1/finetunes/{finetune_id}/curves', { ...tuned(id), signal })).data!,
  })

/** Task vectors and merges of trained experts; with `against`, those of another fine-tuning besides. */
export const analysis = (id: string, against?: string) =>
  queryOptions({
    queryKey: ['finetune', id, 'analysis', against],
    queryFn: async ({ signal }) => {
      const params = { path: { finetune_id: id }, query: against === undefined ? {} : { against: [against] } }
      return (await api.GET('/v1/finetunes/{finetune_id}/analysis', { params, signal })).data!
    },
  })

export const benchmarks = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'benchmarks'],
    queryFn: async ({ signal }) => (await api.GET('/v1/studies/{study_id}/benchmarks', { ...at(id), signal })).data!,
  })

export const served = (id: string) =>
  queryOptions({
    queryKey: ['served', id],
    queryFn: async ({ signal }) => {
      const params = { path: { served_id: id } }
      return (await api.GET('/v1/served/{served_id}', { params, signal })).data!
    },
    refetchInterval: ofRunning,
  })

/** Jobs that serve a study now, newest first. */
export const servedStudies = (id: string) =>
  queryOptions({
    queryKey: ['study', id, 'served'],
    queryFn: async ({ signal }) => {
      const params = { query: { sort: '-created', limit: 200 } as const }
      const found = (await api.GET('/v1/served', { params, signal })).data!.served
      return found.filter((job) => job.study === id && !isFinished(job))
    },
  })
