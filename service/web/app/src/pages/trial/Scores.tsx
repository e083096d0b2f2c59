import type { ShownTrial, Study, Summary } from '../../api/types'
import { count } from '../../format'
import { Nothing } from '../../parts/Answer'
import { Difference, Interval } from '../../parts/Interval'
import { noHoldout } from '../../parts/noHoldout'
import { WithError } from '../../parts/WithError'

/** The trial's values on search and held-out data side by side, and its values at each rung. */
export function Scores({ study, trial, summary }: { study: Study; trial: ShownTrial; summary: Summary }) {
  if (trial.rungs.length === 0)
    return (
      <section aria-labelledby="scores">
        <h2 id="scores">Scores</h2>
        <Nothing>The trial has finished no rung.</Nothing>
      </section>
    )
  return (
    <section aria-labelledby="scores">
      <h2 id="scores">Scores</h2>
      <SideBySide study={study} trial={trial} summary={summary} />
      <h3>By rung</h3>
      <Rungs trial={trial} />
    </section>
  )
}

/** Search data at the highest rung, held-out data with intervals, and the paired difference to the reference trial. */
function SideBySide({ study, trial, summary }: { study: Study; trial: ShownTrial; summary: Summary }) {
  const last = trial.rungs.at(-1)!
  const row = summary.holdout.find((each) => each.trial === trial.number)
  const reference = summary.holdout_reference
  const hasDifference = row !== undefined && reference !== null && reference !== trial.number
  return (
    <>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Values on search and held-out data">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                objective
              </th>
              <th scope="col">search data</th>
              <th scope="col">samples</th>
              {row && <th scope="col">held-out data</th>}
              {row && <th scope="col">samples</th>}
              {hasDifference && <th scope="col">minus trial {reference}</th>}
            </tr>
          </thead>
          <tbody>
            {Object.keys(last.values).map((name) => (
              <tr key={name}>
                <th scope="row" className="l">
                  {name}
                </th>
                <td>
                  <WithError value={last.values[name]} error={last.standard_errors[name]} />
                </td>
                <td>{last.samples[name] !== undefined && count(last.samples[name])}</td>
                {row && (
                  <td>
                    <Interval of={row.values[name]} />
                  </td>
                )}
                {row && <td>{row.values[name] && count(row.values[name].samples)}</td>}
                {hasDifference && (
                  <td>
                    <Difference of={row.differences[name]} />
                  </td>
                )}
              </tr>
            ))}
            {row?.mean && (
              <tr>
                <th scope="row" className="l">
                  mean
                </th>
                <td />
                <td />
                <td>
                  <Interval of={row.mean} />
                </td>
                <td>{count(row.mean.samples)}</td>
                {hasDifference && (
                  <td>
                    <Difference of={row.differences.mean} />
                  </td>
                )}
              </tr>
            )}
          </tbody>
        </table>
      </div>
      <HeldOutNote study={study} trial={trial} summary={summary} />
    </>
  )
}

function HeldOutNote({ study, trial, summary }: { study: Study; trial: ShownTrial; summary: Summary }) {
  const failed = summary.holdout_failures.find((each) => each.trial === trial.number)
  if (failed) return <p>The trial failed on held-out data: {failed.reason}</p>
  if (summary.holdout_reference === trial.number)
    return <p className="soft">Differences of other trials on held-out data are relative to this trial.</p>
  if (summary.holdout.some((each) => each.trial === trial.number))
    return (
      <p className="soft">
        Intervals are 95 %. The difference to trial {summary.holdout_reference} is paired by sample; it is grey where
        its interval contains 0.
      </p>
    )
  if (summary.holdout.length > 0)
    return <Nothing>The trial is not one of those that were scored on held-out data.</Nothing>
  return <Nothing>{noHoldout(study, summary)}</Nothing>
}

function Rungs({ trial }: { trial: ShownTrial }) {
  const names = Object.keys(trial.rungs.at(-1)!.values)
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label="Values by rung">
      <table className="data">
        <thead>
          <tr>
            <th scope="col">rung</th>
            <th scope="col">samples</th>
            {names.map((name) => (
              <th key={name} scope="col">
                {name}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {trial.rungs.map((rung) => (
            <tr key={rung.rung}>
              <th scope="row">{rung.rung}</th>
              <td>{count(Object.values(rung.samples).reduce((a, b) => a + b, 0))}</td>
              {names.map((name) => (
                <td key={name}>
                  <WithError value={rung.values[name]} error={rung.standard_errors[name]} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}
