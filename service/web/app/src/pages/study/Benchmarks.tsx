import { useQuery } from '@tanstack/react-query'
import { benchmarks as benchmarksQuery } from '../../api/queries'
import { useMay } from '../../api/rights'
import type { Benchmarks as Results } from '../../api/types'
import { Answer, Nothing } from '../../parts/Answer'
import { AddBenchmarks } from './AddBenchmarks'
import { Attacks, Judged } from './BenchmarkDetails'
import { BenchmarkTable, Subtasks } from './BenchmarkTable'
import { BenchmarkTests } from './BenchmarkTests'
import { useStudy } from './StudyLayout'

/** Results on benchmarks, which are scored after the search and select nothing; more can be added at the end. */
export function Benchmarks() {
  const { study } = useStudy()
  const query = useQuery(benchmarksQuery(study.id))
  const mayChange = useMay(study, 'change')
  const isComplete = study.state === 'COMPLETE'
  return (
    <>
      <h2>Benchmarks</h2>
      <Answer of={query}>{(found) => <Sections results={found} />}</Answer>
      {mayChange &&
        (isComplete ? (
          <AddBenchmarks study={study} />
        ) : (
          <Nothing>Benchmarks can be added once the study is complete.</Nothing>
        ))}
    </>
  )
}

function Sections({ results }: { results: Results }) {
  const { study } = useStudy()
  if (results.benchmarks.length === 0)
    return (
      <Nothing>
        The study has no results on benchmarks. They are in the section &ldquo;benchmarks&rdquo; of a study file, and
        are scored when the search and the held-out stage have ended.
      </Nothing>
    )
  if (results.rows.length === 0 && results.failures.length === 0)
    return (
      <Nothing>
        No trial has been scored on {results.benchmarks.map(({ name }) => name).join(', ')} yet. They are scored after
        the search and the held-out stage.
      </Nothing>
    )
  return (
    <>
      <BenchmarkTable id={study.id} results={results} />
      <BenchmarkTests id={study.id} results={results} />
      <Attacks id={study.id} results={results} />
      <Judged id={study.id} results={results} />
      <Subtasks id={study.id} results={results} />
      <Failures results={results} />
    </>
  )
}

/** Trials that could not be scored on a benchmark, with the reasons. */
function Failures({ results }: { results: Results }) {
  if (results.failures.length === 0) return null
  return (
    <section aria-labelledby="failures">
      <h3 id="failures">Not scored</h3>
      <ul>
        {results.failures.map(({ trial, benchmark, reason }) => (
          <li key={`${trial} ${benchmark}`}>
            ✕ Trial {trial} on {benchmark}: {reason}
          </li>
        ))}
      </ul>
    </section>
  )
}
