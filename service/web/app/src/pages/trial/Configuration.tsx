import type { ShownTrial } from '../../api/types'
import { parameterValue } from '../../format'

/** The trial's value of each parameter of the search space, closed until it is opened. */
export function Configuration({ trial }: { trial: ShownTrial }) {
  const parameters = Object.entries(trial.configuration ?? {})
  if (parameters.length === 0) return null
  return (
    <details>
      <summary className="soft">
        Configuration: {parameters.length} {parameters.length === 1 ? 'parameter' : 'parameters'} of the search space
      </summary>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Configuration">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                parameter
              </th>
              <th scope="col">value</th>
            </tr>
          </thead>
          <tbody>
            {parameters.map(([name, given]) => (
              <tr key={name}>
                <th scope="row" className="l">
                  {name}
                </th>
                <td>{parameterValue(given)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </details>
  )
}
