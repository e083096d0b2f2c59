import type { Benchmarks } from '../../api/types'
import { count, percent, value } from '../../format'
import { Interval } from '../../parts/Interval'
import { TrialLink } from './BenchmarkTable'

const ATTACKS: Record<string, string> = { stress: 'StressTest', deepwordbug: 'DeepWordBug', bert: 'BERT-Attack' }

/** What attacks on the prompts of a benchmark do to each trial: value, share that is lost, and the worst template. */
export function Attacks({ id, results }: { id: string; results: Benchmarks }) {
  return results.benchmarks.map(({ name, attack }) => {
    if (attack === null) return null
    const rows = results.rows.filter((row) => row.attacks[name] !== undefined)
    return (
      <section key={name} aria-labelledby={`attack-${name}`}>
        <h3 id={`attack-${name}`}>{name} with attacked prompts</h3>
        <p className="soft">
          {ATTACKS[`${attack.kind}`] ?? `${attack.kind}`} changes the template of the prompts, and searches for the one
          with which a trial is worst. The drop is the share of the original value that is lost.
        </p>
        <p>
          Original template: <code>{`${attack.template}`}</code>
        </p>
        {rows.length === 0 ? (
          <p className="soft">No attack has ended yet.</p>
        ) : (
          // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
          <div className="wide" tabIndex={0} role="region" aria-label={`Table of ${name} with attacked prompts`}>
            <table className="data">
              <thead>
                <tr>
                  <th scope="col">trial</th>
                  <th scope="col" className="l">
                    label
                  </th>
                  <th scope="col">original</th>
                  <th scope="col">attacked</th>
                  <th scope="col">drop</th>
                  <th scope="col">templates</th>
                  <th scope="col" className="l">
                    worst template
                  </th>
                </tr>
              </thead>
              <tbody>
                {rows.map((row) => {
                  const found = row.attacks[name]!
                  return (
                    <tr key={row.trial}>
                      <th scope="row">
                        <TrialLink id={id} trial={row.trial} />
                      </th>
                      <td className="l">{row.label}</td>
                      <td>
                        <Interval of={row.values[name]} />
                      </td>
                      <td>
                        <Interval of={found.value} />
                      </td>
                      <td>{found.drop === null ? 'the original is not positive' : <Interval of={found.drop} />}</td>
                      <td>
                        {count(found.queries)}
                        {found.is_cut && <small>limit reached</small>}
                      </td>
                      <td className="l wrap">
                        <code>{found.template}</code>
                      </td>
                    </tr>
                  )
                })}
              </tbody>
            </table>
          </div>
        )}
      </section>
    )
  })
}

/** Preferences of a judge for the completions of each trial, and how much the judge agrees with itself. */
export function Judged({ id, results }: { id: string; results: Benchmarks }) {
  return results.benchmarks.map(({ name, judge }) => {
    if (judge === null) return null
    const rows = results.rows.filter((row) => row.judged[name] !== undefined)
    const models = [...new Set(rows.flatMap((row) => row.judged[name]!.models))]
    return (
      <section key={name} aria-labelledby={`judge-${name}`}>
        <h3 id={`judge-${name}`}>
          {name}, judged by {models.join(', ') || `${judge.model}`}
        </h3>
        <p className="soft">
          The win rate is the plain one, without control of length. The reference answers have{' '}
          {count(Math.round(Number(judge.reference_length)))} characters on average. Each completion is judged as the
          first and as the second answer; 50 % of verdicts for the first answer is no bias.
        </p>
        {rows.length === 0 ? (
          <p className="soft">No trial has been judged yet.</p>
        ) : (
          // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
          <div className="wide" tabIndex={0} role="region" aria-label={`Judgments on ${name}`}>
            <table className="data">
              <thead>
                <tr>
                  <th scope="col">trial</th>
                  <th scope="col" className="l">
                    label
                  </th>
                  <th scope="col">win rate</th>
                  <th scope="col">both orders agree</th>
                  <th scope="col">for the first answer</th>
                  <th scope="col">without verdict</th>
                  <th scope="col">mean length</th>
                </tr>
              </thead>
              <tbody>
                {rows.map((row) => {
                  const found = row.judged[name]!
                  return (
                    <tr key={row.trial}>
                      <th scope="row">
                        <TrialLink id={id} trial={row.trial} />
                      </th>
                      <td className="l">{row.label}</td>
                      <td>{row.values[name] ? <Interval of={row.values[name]} /> : value(null)}</td>
                      <td>{percent(found.agreement)}</td>
                      <td>{percent(found.first)}</td>
                      <td>{count(found.without_verdict)}</td>
                      <td>{count(Math.round(found.length))}</td>
                    </tr>
                  )
                })}
              </tbody>
            </table>
          </div>
        )}
      </section>
    )
  })
}
