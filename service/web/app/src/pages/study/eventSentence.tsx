import { Link } from '@tanstack/react-router'
import { Fragment, type ReactNode } from 'react'
import type { StudyEvent } from '../../api/types'
import { count, duration, value } from '../../format'

type Payload = Record<string, unknown>

/** An event of a study as a sentence; events of kinds that the page does not know are shown with their content. */
export function sentenceOf({ kind, payload }: StudyEvent, study: string): ReactNode {
  const tell = SENTENCES[kind]
  return tell === undefined
    ? unknown(kind, payload)
    : tell(payload, (number, word = 'trial') => <Trial study={study} number={number} word={word} />)
}

/** A link to a trial, after a word that names it. */
type Trials = (number: unknown, word?: string) => ReactNode
type Sentence = (payload: Payload, trial: Trials) => ReactNode

const text = (given: unknown) => (given === null || given === undefined ? '' : String(given))
const because = (given: unknown) => (text(given) === '' ? '' : `: ${text(given)}`)
const small = (state: unknown) => text(state).toLowerCase()
const by = (user: unknown) => (text(user) === '' ? 'A request' : text(user))

const SENTENCES: Record<string, Sentence> = {
  created: ({ name }) => `The study was created${text(name) && ` with the name ${text(name)}`}.`,
  attempt: ({ attempt, because: why }) => `Driver ${text(attempt)} took over${because(why)}.`,
  state: ({ state, reason }) => `The study is ${small(state)}${because(reason)}.`,
  waiting: ({ reason }) => `The study waits${because(reason)}.`,
  resumed: () => 'The study continues.',
  preempted: ({ reason }) => `The study gave its place to another job${because(reason)}.`,
  job_refused: ({ reason }) => `Ray refused the driver${because(reason)}.`,
  steered: steered,
  trial: ({ trial: number, label }, trial) => (
    <>
      {trial(number, 'Trial')} was added: {text(label)}.
    </>
  ),
  rung: ({ trial: number, rung, values, state }, trial) => (
    <>
      {trial(number, 'Trial')} finished rung {text(rung)} with {valuesOf(values)}
      {text(state) && `, and is ${small(state)}`}.
    </>
  ),
  trial_state: ({ trial: number, state, reason }, trial) => (
    <>
      {trial(number, 'Trial')} is {small(state)}
      {because(reason)}.
    </>
  ),
  replica: ({ replica, engine, trial: number }, trial) => (
    <>
      Replica {text(replica)} ({text(engine)}) scored its first samples, of {trial(number)}.
    </>
  ),
  crash: ({ trial: number, reason, replica }, trial) => (
    <>
      An engine crashed{text(replica) && ` on replica ${text(replica)}`}
      {number !== undefined && <> while it scored {trial(number)}</>}
      {because(reason)}.
    </>
  ),
  actors: ({ running, wanted, reason }) => `${text(running)} of ${text(wanted)} trial actors run${because(reason)}.`,
  database: ({ away_s: away }) => `The database was away for ${duration(Number(away))}.`,
  search_note: ({ text: note }) => text(note),
  search_ended: ({ reason }) => `The search ended${because(reason)}.`,
  stopping: () => 'The search is being stopped.',
  holdout_started: ({ trials }, trial) => <>Held-out data are scored for {listed(trials, trial)}.</>,
  holdout_scored: ({ trial: number }, trial) => <>{trial(number, 'Trial')} was scored on held-out data.</>,
  holdout_failed: ({ trial: number, reason }, trial) => (
    <>
      {trial(number, 'Trial')} cannot be scored on held-out data{because(reason)}.
    </>
  ),
  benchmarks_added: ({ benchmarks }) => `Benchmarks were added: ${(benchmarks as string[]).join(', ')}.`,
  benchmarks_started: ({ left }) => `Benchmarks began: ${count((left as unknown[]).length)} evaluations.`,
  benchmark_scored: ({ trial: number, benchmark }, trial) => (
    <>
      {trial(number, 'Trial')} was scored on benchmark {text(benchmark)}.
    </>
  ),
  benchmark_failed: ({ trial: number, benchmark, reason }, trial) => (
    <>
      {trial(number, 'Trial')} cannot be scored on benchmark {text(benchmark)}
      {because(reason)}.
    </>
  ),
  out_of_range: ({ trial: number, objective, message }, trial) => (
    <>
      {trial(number, 'Trial')}, {text(objective)}: {text(message)}.
    </>
  ),
  verification: () => 'The verification was stored.',
  canaries: () => 'The checks of the engines were stored.',
  engine_fault: ({ replicas, samples }) =>
    `An engine failed a check, so that ${count(Number(samples))} samples are void: ${Object.entries(replicas as Payload)
      .map(([replica, reason]) => `${replica}: ${text(reason)}`)
      .join('; ')}.`,
  scored_again: ({ samples }) => `${count(Number(samples))} void samples were scored again.`,
  texts_deleted: () => 'Responses of other trials were deleted.',
  responses_removed: ({ num_samples: samples }) => `Responses of ${count(Number(samples))} samples were removed.`,
}

const DONE: Record<string, string> = {
  pause: 'asked to pause the study',
  resume: 'asked to resume the study',
  stop: 'asked to stop the search',
  cancel: 'cancelled the study',
  move: 'moved the study in the queue',
  edit: 'edited the study',
}

function steered({ action, user, reason, changes, trial: number }: Payload, trial: Trials): ReactNode {
  const who = by(user)
  const changed = Object.entries((changes ?? {}) as Record<string, unknown[]>)
  switch (action) {
    case 'enqueue':
      return `${who} enqueued a merge${because(changed.map(([, [, label]]) => text(label)).join(', '))}${because(reason)}.`
    case 'evaluate':
      return (
        <>
          {who} asked to evaluate {trial(number)} at the full budget{because(reason)}.
        </>
      )
    case 'invalidate':
    case 'validate':
      return (
        <>
          {who} marked {trial(number)} as {action === 'validate' ? 'valid again' : 'invalid'}
          {because(reason)}.
        </>
      )
    default: {
      const edits = changed.map(([name, [old, now]]) => `${name} from ${told(old)} to ${told(now)}`).join(', ')
      return `${who} ${DONE[text(action)] ?? text(action)}${because(edits)}${because(reason)}.`
    }
  }
}

const told = (given: unknown) =>
  given === null || given === undefined ? 'none' : typeof given === 'object' ? JSON.stringify(given) : String(given)

const valuesOf = (values: unknown) =>
  Object.entries((values ?? {}) as Record<string, number>)
    .map(([name, x]) => `${name} ${value(x)}`)
    .join(', ')

const listed = (trials: unknown, trial: Trials) =>
  (Array.isArray(trials) ? trials : []).map((number, k) => (
    <Fragment key={String(number)}>
      {k > 0 && ', '}
      {trial(number)}
    </Fragment>
  ))

function unknown(kind: string, payload: Payload): string {
  const content = Object.entries(payload)
    .map(([name, given]) => `${name} ${told(given)}`)
    .join(', ')
  return `${kind.replaceAll('_', ' ')}${content && `: ${content}`}`
}

function Trial({ study, number, word }: { study: string; number: unknown; word: string }) {
  return (
    <Link to="/studies/$id/trials/$number" params={{ id: study, number: String(number) }}>
      {word} {String(number)}
    </Link>
  )
}
