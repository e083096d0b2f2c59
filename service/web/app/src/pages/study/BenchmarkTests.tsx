import type { Benchmarks } from '../../api/types'
import { Difference } from '../../parts/Interval'
import { TrialLink } from './BenchmarkTable'

type Test = Benchmarks['tests'][number]

const RIVALS = { source: 'best single model', published: 'best published recipe' }

/** Comparisons of all merges with the best single model and the best published recipe, corrected for their number. */
export function BenchmarkTests({ id, results }: { id: string; results: Benchmarks }) {
  if (results.tests.length === 0) return null
  return (
    <section aria-labelledby="tests">
      <h3 id="tests">Better than the rivals?</h3>
      <p className="soft">
        Each merge minus the rival that is best there; larger is better. All intervals against one kind of rival hold
        together at 95 % (Bonferroni). A merge is better if its interval is above 0.
      </p>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Comparisons with rivals">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                benchmark
              </th>
              <th scope="col" className="l">
                rival
              </th>
              <th scope="col" className="l">
                better merges
              </th>
              <th scope="col">largest difference</th>
            </tr>
          </thead>
          <tbody>
            {results.tests.map((test) => (
              <Row key={`${test.name} ${test.is_average} ${test.against}`} id={id} test={test} />
            ))}
          </tbody>
        </table>
      </div>
      <details>
        <summary>All differences</summary>
        <AllDifferences id={id} tests={results.tests} />
      </details>
    </section>
  )
}

const nameOf = (test: Test) => (test.is_average ? `average of ${test.name}` : test.name)

function Row({ id, test }: { id: string; test: Test }) {
  const better = test.differences.filter((each) => each.is_better)
  const largest = test.differences.toSorted((a, b) => b.value - a.value)[0]
  return (
    <tr>
      <th scope="row" className="l">
        {nameOf(test)}
      </th>
      <td className="l">
        {RIVALS[test.against]}: <TrialLink id={id} trial={test.rival} /> {test.label}
      </td>
      <td className="l wrap">
        {better.length === 0
          ? 'no merge is better'
          : better.map(({ trial }, k) => (
              <span key={trial}>
                {k > 0 && ', '}
                <TrialLink id={id} trial={trial} />
              </span>
            ))}
      </td>
      <td>
        {largest && (
          <>
            trial {largest.trial}: <Difference of={largest} />
          </>
        )}
      </td>
    </tr>
  )
}

function AllDifferences({ id, tests }: { id: string; tests: Test[] }) {
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Differences of all merges and rivals">
      <table className="data">
        <thead>
          <tr>
            <th scope="col" className="l">
              benchmark
            </th>
            <th scope="col" className="l">
              rival
            </th>
            <th scope="col">trial</th>
            <th scope="col">minus the rival</th>
            <th scope="col" className="l">
              finding
            </th>
          </tr>
        </thead>
        <tbody>
          {tests.flatMap((test) =>
            test.differences.map((each) => (
              <tr key={`${test.name} ${test.is_average} ${test.against} ${each.trial}`}>
                <th scope="row" className="l">
                  {nameOf(test)}
                </th>
                <td className="l">{test.label}</td>
                <td>
                  <TrialLink id={id} trial={each.trial} />
                </td>
                <td>
                  <Difference of={each} />
                </td>
                <td className="l">{each.is_better ? 'better' : 'not better'}</td>
              </tr>
            )),
          )}
        </tbody>
      </table>
    </div>
  )
}
