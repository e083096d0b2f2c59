import type { Analysis } from '../../api/types'
import { value } from '../../format'
import { Nothing } from '../../parts/Answer'
import { WithError } from '../../parts/WithError'

type Merge = Analysis['fleets'][number]['merges'][number]

/** Losses and metrics of merges of the experts by each method, for each fine-tuning that is compared. */
export function Merges({ analysis }: { analysis: Analysis }) {
  const { fleets } = analysis
  const rows = fleets[0]?.merges ?? []
  const hasValues = fleets.some(({ merges }) => merges.some((merge) => merge.value != null))
  const all = fleets[0]?.task_vectors.length ?? 0
  if (rows.length === 0) return <Nothing>The experts were not merged: there is one expert only.</Nothing>
  return (
    <section aria-labelledby="merges">
      <h3 id="merges">Merges</h3>
      <p className="soft">
        {hasValues
          ? 'The mean metric of the experts’ tasks and their mean loss, at the best of the tried coefficients, which is chosen on other samples.'
          : 'The mean loss over the experts’ tasks at the best of the tried coefficients, which is chosen on the same samples.'}{' '}
        For fewer experts than there are, they are means over all sets of that many. {analysis.samples} samples of each
        task choose the coefficient. ± is the standard deviation of the loss over all coefficients.
      </p>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Merges by method">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                method
              </th>
              <th scope="col">experts</th>
              {fleets.map(({ name }) => (
                <Heads key={name} fleet={fleets.length > 1 ? name : undefined} hasValues={hasValues} />
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={`${row.method} ${row.num_experts}`}>
                <th scope="row" className="l">
                  {row.method}
                </th>
                <td>{row.num_experts ?? all}</td>
                {fleets.map(({ name, merges }) => (
                  <Cells
                    key={name}
                    merge={merges.find((each) => each.method === row.method && each.num_experts === row.num_experts)}
                    hasValues={hasValues}
                  />
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <PerExpert analysis={analysis} />
    </section>
  )
}

function Heads({ fleet, hasValues }: { fleet: string | undefined; hasValues: boolean }) {
  const names = [...(hasValues ? ['metric'] : []), 'loss', 'coefficient']
  return names.map((name) => (
    <th key={name} scope="col">
      {fleet === undefined ? name : `${fleet}: ${name}`}
    </th>
  ))
}

function Cells({ merge, hasValues }: { merge: Merge | undefined; hasValues: boolean }) {
  return (
    <>
      {hasValues && <td>{value(merge?.value)}</td>}
      <td>
        {merge &&
          (merge.mean == null ? (
            NOT_FINITE
          ) : (
            <WithError value={merge.mean} error={merge.coefficient === null ? null : merge.spread} />
          ))}
      </td>
      <td>{merge?.coefficient != null && Number(merge.coefficient.toFixed(4))}</td>
    </>
  )
}

const NOT_FINITE = 'not finite'

const loss = (x: number | null | undefined) => (x == null ? NOT_FINITE : value(x))

/** Losses on each expert's own tasks, folded. */
function PerExpert({ analysis }: { analysis: Analysis }) {
  const experts = [...new Set(analysis.fleets.flatMap(({ merges }) => merges.flatMap((m) => Object.keys(m.losses))))]
  if (experts.length === 0) return null
  return (
    <details>
      <summary>Losses on each expert&apos;s own tasks</summary>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Losses of merges by expert">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                method
              </th>
              {experts.map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {analysis.fleets.flatMap(({ name, merges }) =>
              merges.map((merge) => (
                <tr key={`${name} ${merge.method} ${merge.num_experts}`}>
                  <th scope="row" className="l">
                    {merge.method}
                    {analysis.fleets.length > 1 && `, ${name}`}
                    {merge.num_experts !== undefined && <small>{merge.num_experts} experts</small>}
                  </th>
                  {experts.map((expert) => (
                    <td key={expert}>{expert in merge.losses ? loss(merge.losses[expert]) : ''}</td>
                  ))}
                </tr>
              )),
            )}
          </tbody>
        </table>
      </div>
    </details>
  )
}
