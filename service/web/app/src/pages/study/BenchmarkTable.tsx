import { Link } from '@tanstack/react-router'
import type { Benchmarks, Estimate } from '../../api/types'
import { count } from '../../format'
import { Difference, Interval } from '../../parts/Interval'

type Row = Benchmarks['rows'][number]
type Benchmark = Benchmarks['benchmarks'][number]

interface Column {
  key: string
  head: string
  note: string
  value: (row: Row) => Estimate | undefined
  difference: (row: Row) => Estimate | undefined
}

/** Columns of the table: the benchmarks of each group with the group's average, then those without a group. */
function columnsOf({ benchmarks, groups }: Benchmarks): { group: string; columns: Column[] }[] {
  const single = ({ name, metric, samples, direction }: Benchmark): Column => ({
    key: name,
    head: name,
    note: `${metric}, ${count(samples)} samples${direction === 'minimize' ? ', smaller is better' : ''}`,
    value: (row) => row.values[name],
    difference: (row) => row.differences[name],
  })
  const grouped = Object.entries(groups).map(([group, names]) => {
    const columns = benchmarks.filter(({ name }) => names.includes(name)).map(single)
    if (names.length > 1)
      columns.push({
        key: `average of ${group}`,
        head: 'average',
        note: `unweighted mean of ${names.length}`,
        value: (row) => row.averages[group],
        difference: (row) => row.average_differences[group],
      })
    return { group, columns }
  })
  const rest = benchmarks.filter(({ group }) => group === null).map(single)
  return rest.length === 0 ? grouped : [...grouped, { group: '', columns: rest }]
}

/** Values of each trial on each benchmark with 95 % intervals, and paired differences to the reference. */
export function BenchmarkTable({ id, results }: { id: string; results: Benchmarks }) {
  const { rows, reference } = results
  const groups = columnsOf(results)
  const columns = groups.flatMap((each) => each.columns)
  const hasGroups = groups.some(({ group }) => group !== '')
  return (
    <>
      <p className="soft">
        Values with 95 % intervals.
        {reference !== null && ` Below them: minus trial ${reference}, the best on search data, on the same samples.`}
      </p>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Values on benchmarks">
        <table className="data">
          <thead>
            {hasGroups && (
              <tr>
                <td colSpan={2} />
                {groups.map(({ group, columns: own }) =>
                  group === '' ? (
                    <td key="" colSpan={own.length} />
                  ) : (
                    <th key={group} scope="colgroup" colSpan={own.length} style={{ textAlign: 'center' }}>
                      {group}
                    </th>
                  ),
                )}
              </tr>
            )}
            <tr>
              <th scope="col">trial</th>
              <th scope="col" className="l">
                label
              </th>
              {columns.map(({ key, head, note }) => (
                <th key={key} scope="col" title={note}>
                  {head}
                  <br />
                  <small>{note}</small>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr key={row.trial}>
                <th scope="row">
                  <TrialLink id={id} trial={row.trial} />
                </th>
                <td className="l">
                  {row.label}
                  <small>{row.trial === reference ? `${row.origin}, reference` : row.origin}</small>
                </td>
                {columns.map(({ key, value, difference }) => (
                  <td key={key}>
                    <Interval of={value(row)} />
                    {row.trial !== reference && difference(row) && (
                      <div>
                        <Difference of={difference(row)} />
                      </div>
                    )}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  )
}

export function TrialLink({ id, trial }: { id: string; trial: number }) {
  return (
    <Link to="/studies/$id/trials/$number" params={{ id, number: `${trial}` }}>
      {trial}
    </Link>
  )
}

/** Values of the subtasks of each benchmark that is a group of tasks, and of the categories within it; folded. */
export function Subtasks({ id, results }: { id: string; results: Benchmarks }) {
  const shown = results.benchmarks.filter(({ subtasks }) => Object.keys(subtasks).length > 1)
  if (shown.length === 0) return null
  return (
    <section aria-labelledby="subtasks">
      <h3 id="subtasks">Subtasks</h3>
      {shown.map((benchmark) => (
        <details key={benchmark.name}>
          <summary>
            {benchmark.name}: {Object.keys(benchmark.subtasks).length} subtasks
          </summary>
          <SubtaskTable id={id} benchmark={benchmark} rows={results.rows} />
        </details>
      ))}
    </section>
  )
}

function SubtaskTable({ id, benchmark, rows }: { id: string; benchmark: Benchmark; rows: Row[] }) {
  const { name, subtasks, categories } = benchmark
  const own = rows.filter((row) => row.subtasks[name] !== undefined)
  const lines = [
    ...Object.entries(categories).map(([key, members]) => ({ key, note: `mean of ${members.length} subtasks` })),
    ...Object.keys(subtasks)
      .toSorted()
      .map((key) => ({ key, note: `${count(subtasks[key]!)} samples` })),
  ]
  return (
    // oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex
    <div className="wide" tabIndex={0} role="region" aria-label={`Subtasks of ${name}`}>
      <table className="data">
        <thead>
          <tr>
            <th scope="col" className="l">
              subtask
            </th>
            {own.map((row) => (
              <th key={row.trial} scope="col">
                trial <TrialLink id={id} trial={row.trial} />
                <br />
                <small>{row.label}</small>
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {lines.map(({ key, note }) => (
            <tr key={key}>
              <th scope="row" className="l">
                {key}
                <small>{note}</small>
              </th>
              {own.map((row) => (
                <td key={row.trial}>
                  <Interval of={row.subtasks[name]?.[key]} />
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  )
}
