/** Texts that do elsewhere what the page shows: commands, and a study file. */
import type { Recipe } from '../../api/types'

/** Where a study's models are: directories, hub ids, or merges of other studies. */
export interface Models {
  base: string
  experts: Record<string, unknown>
}

/** A word of a shell command. */
export const quoted = (word: string) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", `'\\''`)}'`)

/** A command that fetches the recipe of a trial from `server`; where users need a token, it is read from a variable. */
export function curlCommand(server: string, id: string, number: number, hasAccounts: boolean): string {
  const token = hasAccounts ? '-H "Authorization: Bearer $MERGESEARCH_TOKEN" ' : ''
  return `curl --fail ${token}-o trial-${number}.json ${quoted(`${server}/v1/studies/${id}/trials/${number}/recipe`)}`
}

/** Commands that merge the trial's recipe on a machine with the models. */
export function mergeCommand(server: string, id: string, number: number, recipe: Recipe, models: Models): string {
  const file = `trial-${number}.json`
  const options = Object.keys(recipe.models).map((alias) => {
    const place = placeOf(alias, models)
    return `--model ${quoted(`${alias}=${isDirectory(place) ? place : DIRECTORY}`)}`
  })
  return [
    `mergesearch recipe ${id} ${number} --server ${quoted(server)} > ${file}`,
    [`mergesearch merge ${file} --out trial-${number}`, ...options].join(' \\\n  '),
  ].join('\n')
}

/** Models of a recipe whose directory only the user knows: those that are on a hub, or merges of other studies. */
export function elsewhere(recipe: Recipe, models: Models): string[] {
  return Object.keys(recipe.models).filter((alias) => !isDirectory(placeOf(alias, models)))
}

// In place of the directory of a model that is not one in the study file.
const DIRECTORY = 'DIRECTORY'

const placeOf = (alias: string, { base, experts }: Models) => (alias === 'base' ? base : experts[alias])

const isDirectory = (place: unknown): place is string => typeof place === 'string' && place.startsWith('/')

const MAX_NAME = 63

/**
 * The file of a study that continues from a trial: like the trial's study, with the merge as one more expert. What an
 * earlier study taught the searcher is left out, because it was learned with other experts.
 */
export function continuingStudy(file: Record<string, unknown>, id: string, number: number): Record<string, unknown> {
  const models = file.models as Models
  const search = { ...(file.search as Record<string, unknown>) }
  delete search.warm_start
  if (search.hm3 != null) search.hm3 = { ...(search.hm3 as object), start: null }
  let alias = `trial-${number}`
  while (alias in models.experts) alias = `${alias}-`.slice(0, MAX_NAME)
  const experts = { ...models.experts, [alias]: { from_study: { id, trial: number } } }
  const suffix = `-from-${number}`
  return {
    ...file,
    name: `${(file.name as string).slice(0, MAX_NAME - suffix.length)}${suffix}`,
    models: { ...models, experts },
    search,
  }
}
