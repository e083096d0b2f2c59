import { Button, TextInput } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { type FormEvent, useState } from 'react'
import { summary } from '../../api/queries'
import { trialNumber } from '../../api/samples'
import type { Summary } from '../../api/types'
import { Answer, Nothing } from '../../parts/Answer'
import { StudyPicker } from '../../parts/StudyPicker'
import { compareRoute } from '../../router'
import { CompareStudies } from './CompareStudies'
import { CompareTrials } from './CompareTrials'
import { useStudy } from './StudyLayout'

/** Two trials of the study, or the study and another one. */
export function Compare() {
  const { study } = useStudy()
  const results = useQuery(summary(study.id))
  return (
    <Answer of={results}>
      {(found) => (
        <>
          <Trials summary={found} />
          <Studies summary={found} />
        </>
      )}
    </Answer>
  )
}

/** The two trials of an address such as `?trials=12,15`; without one, the best trial and the next on held-out data. */
function chosenTrials(text: string | undefined, { holdout, holdout_reference }: Summary): (number | undefined)[] {
  if (text !== undefined) return text.split(',').slice(0, 2).map(trialNumber)
  if (holdout_reference === null) return []
  const isMerge = ({ origin }: Summary['holdout'][number]) => origin !== 'source' && origin !== 'published'
  // Without a mean, as of losses, one merge is as good as another here, and better than a baseline.
  const [second] = holdout
    .filter((row) => row.trial !== holdout_reference)
    .toSorted((a, b) => (b.mean?.value ?? 0) - (a.mean?.value ?? 0) || Number(isMerge(b)) - Number(isMerge(a)))
  return [holdout_reference, second?.trial]
}

function Trials({ summary: found }: { summary: Summary }) {
  const { trials } = compareRoute.useSearch()
  const [a, b] = chosenTrials(trials, found)
  return (
    <section aria-labelledby="trials">
      <h2 id="trials">Two trials</h2>
      <TrialPickers key={`${a} ${b}`} a={a} b={b} />
      {a === undefined || b === undefined ? (
        <Nothing>Give the numbers of two trials.</Nothing>
      ) : (
        <CompareTrials a={a} b={b} summary={found} />
      )}
    </section>
  )
}

function TrialPickers({ a, b }: { a: number | undefined; b: number | undefined }) {
  const navigate = compareRoute.useNavigate()
  const [texts, setTexts] = useState([a, b].map((number) => `${number ?? ''}`))
  const [first, second] = texts.map(trialNumber)
  const isComplete = first !== undefined && second !== undefined
  const submit = (event: FormEvent) => {
    event.preventDefault()
    if (isComplete) navigate({ search: (old) => ({ ...old, trials: `${first},${second}` }) })
  }
  const field = (label: string, k: number) => (
    <TextInput
      label={label}
      inputMode="numeric"
      style={{ width: 120 }}
      value={texts[k]}
      error={texts[k] !== '' && trialNumber(texts[k]) === undefined && 'Give a number.'}
      onChange={(event) => {
        const text = event.currentTarget.value
        setTexts((old) => old.map((each, j) => (j === k ? text : each)))
      }}
    />
  )
  return (
    <form className="row" style={{ alignItems: 'end' }} onSubmit={submit}>
      {field('Trial', 0)}
      {field('Against trial', 1)}
      <Button type="submit" variant="default">
        Compare
      </Button>
    </form>
  )
}

function Studies({ summary: found }: { summary: Summary }) {
  const { study } = useStudy()
  const other = compareRoute.useSearch().with
  const navigate = compareRoute.useNavigate()
  return (
    <section aria-labelledby="studies">
      <h2 id="studies">Another study</h2>
      <div className="row">
        <StudyPicker
          label="Another study"
          any="none"
          isOffered={(each) => each.id !== study.id}
          none={<Nothing>There is no other study.</Nothing>}
          value={other}
          onChange={(id) => navigate({ search: (old) => ({ ...old, with: id }), replace: true })}
        />
      </div>
      {other !== undefined && <CompareStudies study={study} summary={found} other={other} />}
    </section>
  )
}
