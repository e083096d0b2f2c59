import './samples.css'
import { Button } from '@mantine/core'
import { useLocalStorage } from '@mantine/hooks'
import { useInfiniteQuery, useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { type RefObject, useEffect, useRef, useState } from 'react'
import { BASE } from '../../api/client'
import { benchmarks as benchmarksQuery, pareto, study as studyQuery, trial as trialQuery } from '../../api/queries'
import { KEPT, type Kept, SPLITS, type Split, oneOf, samples as samplesQuery, trialNumber } from '../../api/samples'
import type { components } from '../../api/schema'
import type { Objective, Trial } from '../../api/types'
import { count, value } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { Filter } from '../../parts/Filter'
import { Difference } from '../../parts/Interval'
import { Page } from '../../parts/Page'
import { samplesRoute } from '../../router'
import { type Run, wordDifferences } from '../../words'

type Schemas = components['schemas']
type Sample = Schemas['SampleDocument']
type Shown = Schemas['TrialSamplesDocument']

const PAGE = 20

// Characters of a prompt that are shown unfolded: its end, where the question is.
const PROMPT_END = 400

const WORDS: Record<Split, string> = {
  search: 'data of the search',
  holdout: 'held-out data',
  bench: 'benchmarks',
}

/** Samples of one trial, or of two aligned by document: prompts, references and answers with their differences. */
export function Samples() {
  const { id, number } = samplesRoute.useParams()
  const study = useQuery(studyQuery(id))
  const trial = useQuery(trialQuery(id, Number(number)))
  const front = useQuery(pareto(id))
  return (
    <Page
      title="Samples"
      before={
        <nav aria-label="Breadcrumb" className="row">
          <Link to="/studies/$id" params={{ id }}>
            {study.data?.name ?? id}
          </Link>
          <Link to="/studies/$id/trials/$number" params={{ id, number }}>
            Trial {number}
          </Link>
        </nav>
      }
    >
      <Answer of={trial}>
        {(found) => <Answer of={front}>{({ objectives }) => <Chosen trial={found} objectives={objectives} />}</Answer>}
      </Answer>
    </Page>
  )
}

/** Objectives that have samples: those that the trial was scored on, or all as long as it was not scored. */
function objectiveNames(trial: Trial, objectives: Objective[]): string[] {
  const scored = Object.entries(trial.rungs.at(-1)?.samples ?? {})
  return scored.length ? scored.flatMap(([name, n]) => (n > 0 ? [name] : [])) : objectives.map(({ name }) => name)
}

/** The filters, which are in the address, and what they choose. */
function Chosen({ trial, objectives }: { trial: Trial; objectives: Objective[] }) {
  const { id, number } = samplesRoute.useParams()
  const search = samplesRoute.useSearch()
  const navigate = samplesRoute.useNavigate()
  const change = (changed: Partial<typeof search>) =>
    navigate({ search: (old) => ({ ...old, ...changed }), replace: true })
  const against = trialNumber(search.against)
  const split = oneOf(SPLITS, search.split) ?? 'search'
  const only = against === undefined ? undefined : oneOf(KEPT, search.only)
  const benchmarks = useQuery(benchmarksQuery(id))
  const onBenchmarks = benchmarks.data?.benchmarks.map(({ name }) => name) ?? []
  const names = split === 'bench' ? onBenchmarks : objectiveNames(trial, objectives)
  const objective = search.objective ?? names[0]
  const direction = objectives.find(({ name }) => name === objective)?.direction
  const asked = { objective: search.objective, split, against, only }
  const shown = useInfiniteQuery(samplesQuery(id, trial.number, { ...asked, limit: PAGE })).data?.pages[0]
  // Without labels nothing is right or wrong; values may differ.
  const isJudged = !shown || shown.against === null || shown.counts !== null
  return (
    <>
      <div className="row" role="search" style={{ alignItems: 'end' }}>
        <Choose
          label="Objective"
          options={objective !== undefined && !names.includes(objective) ? [objective, ...names] : names}
          value={objective}
          onChange={(chosen) => change({ objective: chosen })}
        />
        <Choose
          label="Data"
          options={SPLITS.filter((each) => each !== 'bench' || split === each || onBenchmarks.length > 0).map(
            (each) => ({ value: each, label: WORDS[each] }),
          )}
          value={split}
          onChange={(chosen) => change({ split: chosen, objective: undefined })}
        />
        <Filter
          label="Against trial"
          isLabelled
          inputMode="numeric"
          value={search.against}
          error={search.against !== undefined && against === undefined && 'Give the number of a trial.'}
          onType={(text) => change(text ? { against: text } : { against: undefined, only: undefined })}
        />
        {against !== undefined && (
          <Choose
            label="Only"
            any="all samples"
            options={KEPT.filter((each) => isJudged || each === 'differs' || each === only).map((each) => ({
              value: each,
              label: keptWords(each, number, against),
            }))}
            value={only}
            onChange={(chosen) => change({ only: chosen })}
          />
        )}
      </div>
      <List trial={trial} {...asked} direction={direction} />
    </>
  )
}

function keptWords(kept: Kept, a: string, b: number): string {
  return {
    differs: 'different values',
    a_only: `only trial ${a} is right`,
    b_only: `only trial ${b} is right`,
    both_wrong: 'both are wrong',
  }[kept]
}

// Where the trials are flipped, the filters that name one of them are too.
const FLIPPED: Partial<Record<Kept, Kept>> = { a_only: 'b_only', b_only: 'a_only' }

function List(props: {
  trial: Trial
  objective: string | undefined
  split: Split
  against: number | undefined
  only: Kept | undefined
  direction: Objective['direction'] | undefined
}) {
  const { trial, objective, split, against, only, direction } = props
  const { id } = samplesRoute.useParams()
  const navigate = samplesRoute.useNavigate()
  const query = useInfiniteQuery(samplesQuery(id, trial.number, { objective, split, against, only, limit: PAGE }))
  const list = useRef<HTMLOListElement>(null)
  const flip = () => {
    if (against === undefined) return
    navigate({
      to: '/studies/$id/trials/$number/samples',
      params: { id, number: `${against}` },
      search: (old) => ({ ...old, against: `${trial.number}`, only: only && (FLIPPED[only] ?? only) }),
      replace: true,
    })
  }
  const more = async () => {
    if (query.hasNextPage && !query.isFetchingNextPage) await query.fetchNextPage()
  }
  const [hasKeys, setHasKeys] = useKeys({ j: () => step(list, 1, more), k: () => step(list, -1, more), f: flip })
  if (query.data === undefined) {
    if (query.isError) return <Failure error={query.error} retry={() => query.refetch()} />
    return (
      <p role="status" className="soft">
        Loading
      </p>
    )
  }
  const pages = query.data.pages
  const first = pages[0]!
  const all = pages.flatMap((page) => page.samples)
  const missing = [...new Set(pages.flatMap((page) => page.missing))]
  return (
    <>
      {query.isError && <Failure error={query.error} isOld retry={() => query.refetch()} />}
      {(first.counts || first.difference) && <Counts shown={first} direction={direction} />}
      <h2>Answers</h2>
      {missing.map((reason) => (
        <p key={reason} className="soft">
          ○ {first.has_pictures ? 'Pictures or answers' : 'Texts'} are missing: {reason}.
        </p>
      ))}
      <p role="status" className="soft">
        {all.length === 0
          ? nothing(first, only)
          : `${count(all.length)} of ${count(first.total)} ${first.total === 1 ? 'sample' : 'samples'}`}
      </p>
      {all.length > 0 && (
        <p className="soft" style={{ fontSize: 13.5 }}>
          <label>
            <input type="checkbox" checked={hasKeys} onChange={(event) => setHasKeys(event.currentTarget.checked)} />{' '}
            Keys
          </label>{' '}
          <kbd>j</kbd> next sample, <kbd>k</kbd> previous sample
          {against !== undefined && (
            <>
              , <kbd>f</kbd> flips the two trials.
              {!first.has_pictures && ' Underlined words are in one answer only.'}
            </>
          )}
        </p>
      )}
      {against !== undefined && (
        <Button size="xs" variant="default" onClick={flip}>
          Flip the trials
        </Button>
      )}
      <ol className="samples" ref={list}>
        {all.map((sample) => (
          <Row
            key={sample.position}
            sample={sample}
            of={first} // while others are loaded, the samples before are shown
          />
        ))}
      </ol>
      {query.hasNextPage && (
        <Button variant="default" loading={query.isFetchingNextPage} onClick={more}>
          Show the next {Math.min(PAGE, first.total - all.length)}
        </Button>
      )}
    </>
  )
}

function nothing({ counts, against, split }: Shown, only: Kept | undefined): string {
  if (only !== undefined && (counts === null || counts.samples > 0)) return 'No sample matches.'
  if (against !== null) return `No sample of the ${WORDS[split as Split]} was scored for both trials.`
  return `No sample of the ${WORDS[split as Split]} was scored for this trial.`
}

/** Moves the focus to the next or the previous sample; after the last one more are loaded. */
async function step(list: RefObject<HTMLOListElement | null>, by: number, more: () => Promise<void>) {
  const rows = () => [...(list.current?.children ?? [])] as HTMLElement[]
  const at = rows().findIndex((row) => row.contains(document.activeElement))
  if (by > 0 && at === rows().length - 1) {
    await more()
    // Until they are drawn; without further samples, for half a second.
    for (let frame = 0; frame < 30 && rows().length <= at + 1; frame += 1) await new Promise(requestAnimationFrame)
  }
  rows()[at < 0 ? 0 : Math.max(0, at + by)]?.focus()
}

// Fields that letters are typed into; a checkbox takes none.
const TYPED = 'input:not([type=checkbox]), select, textarea'

/**
 * Runs what a single key stands for, unless a field has the focus. Keys without a modifier disturb those who dictate,
 * so that they can be switched off (WCAG 2.1.4); the browser keeps the choice.
 */
function useKeys(actions: Record<string, () => void>) {
  const [isOn, setIsOn] = useLocalStorage({ key: 'samples-keys', defaultValue: true })
  const latest = useRef(actions)
  useEffect(() => {
    latest.current = actions
  })
  useEffect(() => {
    if (!isOn) return
    const press = (event: KeyboardEvent) => {
      const isInField = event.target instanceof Element && event.target.closest(TYPED) !== null
      if (isInField || event.ctrlKey || event.metaKey || event.altKey) return
      latest.current[event.key]?.()
    }
    document.addEventListener('keydown', press)
    return () => document.removeEventListener('keydown', press)
  }, [isOn])
  return [isOn, setIsOn] as const
}

/** How many samples each of the trials has right, if that is known, and the paired difference of the values. */
function Counts({ shown, direction }: { shown: Shown; direction: Objective['direction'] | undefined }) {
  const { counts, difference, trial, against } = shown
  return (
    <section aria-labelledby="counts">
      <h2 id="counts">{counts ? 'Right and wrong' : 'Difference'}</h2>
      {counts && <RightAndWrong trial={trial} against={against!} counts={counts} />}
      <p>
        {shown.objective}, trial {trial} minus trial {against}:{' '}
        {difference ? <Difference of={difference} /> : 'no difference can be computed'}
        <span className="soft">
          {' '}
          over {counts && `${count(counts.samples)} `}
          {counts?.samples === 1 ? 'sample' : 'samples'} that both have
          {direction === 'minimize' && '; smaller is better'}
        </span>
      </p>
    </section>
  )
}

/** A table of two rows: the numbers of samples by which of the two trials is right. */
function RightAndWrong(props: { trial: number; against: number; counts: Schemas['SampleCountsDocument'] }) {
  const { trial, against, counts } = props
  const { both_right, a_only, b_only, both_wrong } = counts
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Numbers of samples that are right">
      <table className="data" style={{ width: 'auto' }}>
        <thead>
          <tr>
            <td />
            <th scope="col">trial {against} right</th>
            <th scope="col">trial {against} wrong</th>
          </tr>
        </thead>
        <tbody>
          <tr>
            <th scope="row" className="l">
              trial {trial} right
            </th>
            <td data-testid="both_right">{count(both_right)}</td>
            <td data-testid="a_only">{count(a_only)}</td>
          </tr>
          <tr>
            <th scope="row" className="l">
              trial {trial} wrong
            </th>
            <td data-testid="b_only">{count(b_only)}</td>
            <td data-testid="both_wrong">{count(both_wrong)}</td>
          </tr>
        </tbody>
      </table>
    </div>
  )
}

function Row({ sample, of }: { sample: Sample; of: Shown }) {
  const { trial, against, has_pictures: isImage } = of
  const { position, document: name, prompt, reference, a, b } = sample
  const [left, right] =
    !isImage && b && a.response !== null && b.response !== null
      ? wordDifferences(a.response, b.response)
      : [undefined, undefined]
  return (
    // Not in the order of the tab key: the keys j and k move the focus to it.
    <li tabIndex={-1} aria-label={`Sample ${position}`}>
      <h3>
        Sample {position} <span className="soft">document {name}</span>
      </h3>
      {isImage ? <Picture key={sample.picture} of={sample} shown={of} /> : prompt !== null && <Prompt text={prompt} />}
      {Boolean(reference) && (
        <>
          <div className="soft">{isImage ? 'Class' : 'Reference'}</div>
          <div className="text">{reference}</div>
        </>
      )}
      <div className={b ? 'halves' : ''}>
        <Response trial={trial} scored={a} runs={left} />
        {b && <Response trial={against!} scored={b} runs={right} />}
      </div>
    </li>
  )
}

/** The stored picture of an image. Its class is said below, so that the text in place of it names the image alone. */
function Picture({ of: { picture, position, document: name }, shown }: { of: Sample; shown: Shown }) {
  const { id } = samplesRoute.useParams()
  const [isLost, setIsLost] = useState(false)
  if (picture === null) return <Nothing>No picture is stored.</Nothing>
  if (isLost) return <Nothing>The picture cannot be loaded.</Nothing>
  // The link of the server lacks a prefix that a proxy has removed.
  const at = `${BASE}/v1/studies/${id}/pictures/${shown.split}/${encodeURIComponent(shown.objective)}/${position}`
  return <img className="picture" src={at} alt={`Image ${name}`} loading="lazy" onError={() => setIsLost(true)} />
}

/** The likeliest classes for an image, with their probabilities. */
function Predictions({ of: found }: { of: Schemas['PredictionDocument'][] }) {
  return (
    <ol className="predictions">
      {found.map(({ name, probability }) => (
        <li key={name}>
          {name} <span className="soft">{(100 * probability).toFixed(1)} %</span>
        </li>
      ))}
    </ol>
  )
}

/** A prompt; of a long one the end, with the question, and the whole folded. */
function Prompt({ text }: { text: string }) {
  const isLong = text.length > PROMPT_END
  return (
    <>
      <div className="soft">Prompt</div>
      <div className="text">{isLong ? `… ${text.slice(-PROMPT_END)}` : text}</div>
      {isLong && (
        <details>
          <summary className="soft">Whole prompt, {count(text.length)} characters</summary>
          <div className="text">{text}</div>
        </details>
      )}
    </>
  )
}

function Response(props: { trial: number; scored: Schemas['ScoredSampleDocument']; runs: Run[] | undefined }) {
  const { trial, scored, runs } = props
  return (
    <div>
      <div>
        <span className="soft">Trial {trial}</span>{' '}
        {scored.is_right !== null && (
          <strong className={scored.is_right ? 'right' : 'wrong'}>
            <span aria-hidden="true">{scored.is_right ? '✓' : '✕'}</span> {scored.is_right ? 'right' : 'wrong'}
          </strong>
        )}{' '}
        <span className="soft">{value(scored.value)}</span>
        {scored.is_truncated && <span className="soft">, the prompt was cut</span>}
      </div>
      {scored.predictions?.length ? (
        <Predictions of={scored.predictions} />
      ) : (
        <div className="text">
          {scored.response === null ? <Nothing>No answer is stored.</Nothing> : null}
          {runs
            ? // oxlint-disable-next-line react/no-array-index-key
              runs.map((run, k) => (run.isOwn ? <mark key={k}>{run.text}</mark> : <span key={k}>{run.text}</span>))
            : scored.response}
        </div>
      )}
    </div>
  )
}
