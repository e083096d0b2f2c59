import { Link } from '@tanstack/react-router'
import type { Study, Trial } from '../../api/types'
import { count, duration, parameterValue, value } from '../../format'
import { State } from '../../parts/State'
import type { Column } from '../../parts/VirtualTable'
import { WithError } from '../../parts/WithError'

/** A column of the table of trials; a reader may hide it, unless it is always shown. */
export interface TrialColumn extends Column<Trial> {
  isAlways?: boolean
  /** Whether it is shown where the reader has not chosen columns. */
  isUsual: boolean
}

const PARAMETER = 'parameter.'

/** All columns of the table of a study's trials, in their order; `parameters` are names of the search space. */
export function trialColumns(study: Study, parameters: readonly string[]): TrialColumn[] {
  const names = study.objectives.map(({ name }) => name)
  const own = (
    head: string,
    sort: string | undefined,
    text: (trial: Trial) => string | number | null | undefined,
    options: Partial<TrialColumn> = {},
  ): TrialColumn => ({ head, sort, isUsual: true, text, cell: text, ...options })
  return [
    own('trial', 'number', ({ number }) => number, {
      isAlways: true,
      cell: ({ number }) => (
        <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${number}` }}>
          {number}
        </Link>
      ),
    }),
    own('label', 'label', ({ label }) => label, { isText: true }),
    own('state', 'state', ({ state }) => state, { isText: true, cell: ({ state }) => <State state={state} /> }),
    own('origin', 'origin', ({ origin }) => origin, { isText: true }),
    own('bracket', undefined, ({ bracket }) => bracket, { isUsual: false }),
    own('rung', 'rung', (trial) => trial.rungs.at(-1)?.rung),
    own('samples', 'samples', samples, { cell: (trial) => counted(samples(trial)) }),
    ...names.flatMap((name) => {
      const last = (trial: Trial) => trial.rungs.at(-1)
      return [
        own(name, `value.${name}`, (trial) => last(trial)?.values[name], {
          cell: (trial) => <WithError value={last(trial)?.values[name]} error={last(trial)?.standard_errors[name]} />,
        }),
        own(`standard error of ${name}`, undefined, (trial) => last(trial)?.standard_errors[name], {
          isUsual: false,
          cell: (trial) => value(last(trial)?.standard_errors[name]),
        }),
      ]
    }),
    own('samples scored', undefined, (trial) => trial.samples_scored, {
      isUsual: false,
      cell: (trial) => count(trial.samples_scored),
    }),
    own('samples reused', undefined, (trial) => trial.samples_reused, {
      isUsual: false,
      cell: (trial) => count(trial.samples_reused),
    }),
    own('time', undefined, seconds, { isUsual: false, cell: (trial) => duration(seconds(trial)) }),
    own('reason', undefined, ({ reason, invalid }) => invalid ?? reason, { isUsual: false, isText: true }),
    own('recipe', undefined, ({ recipe_digest }) => recipe_digest, {
      isUsual: false,
      isText: true,
      cell: ({ recipe_digest }) => <code>{recipe_digest.slice(0, 12)}</code>,
    }),
    ...parameters.map((name) =>
      own(`${PARAMETER}${name}`, `${PARAMETER}${name}`, (trial) => exact(trial.configuration?.[name]), {
        isUsual: false,
        cell: (trial) => parameterValue(trial.configuration?.[name]),
      }),
    ),
  ]
}

/** The columns whose heads are in the address, or the usual ones; those that are always shown are among them. */
export function shownColumns(columns: readonly TrialColumn[], chosen: string | undefined): TrialColumn[] {
  const names = chosen?.split(',')
  return columns.filter(({ head, isAlways, isUsual }) => isAlways || (names ? names.includes(head) : isUsual))
}

function samples(trial: Trial): number | undefined {
  const last = trial.rungs.at(-1)
  return last && Object.values(last.samples).reduce((a, b) => a + b, 0)
}

/** The value of a parameter for a file, with all digits. */
const exact = (given: unknown) => (typeof given === 'number' ? given : parameterValue(given))

const counted = (x: number | undefined) => (x === undefined ? '' : count(x))

const seconds = (trial: Trial) => Object.values(trial.timings_s).reduce((a, b) => a + b, 0)
