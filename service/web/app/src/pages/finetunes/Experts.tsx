import { Progress } from '@mantine/core'
import { BASE } from '../../api/client'
import type { Finetune } from '../../api/types'
import { bytes, count, duration, value } from '../../format'
import { AT_OFFSET, AT_WEIGHTS, LINEARIZED } from './lines'

/** Each expert with its progress, its last loss and evaluation, and its download. */
export function Experts({ finetune }: { finetune: Finetune }) {
  const experts = Object.entries(finetune.experts)
  const names = [...new Set(experts.flatMap(([, expert]) => Object.keys(expert.progress?.values ?? {})))]
  return (
    <section aria-labelledby="experts">
      <h2 id="experts">Experts</h2>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Table of experts">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                expert
              </th>
              <th scope="col" className="l">
                method
              </th>
              <th scope="col" className="l">
                progress
              </th>
              <th scope="col">updates</th>
              <th scope="col">loss</th>
              <th scope="col">per update</th>
              {names.map((name) => (
                <th key={name} scope="col">
                  {name}
                </th>
              ))}
              <th scope="col">model</th>
            </tr>
          </thead>
          <tbody>
            {experts.map(([alias, { method, progress, bytes: size }]) => (
              <tr key={alias}>
                <th scope="row" className="l">
                  {alias}
                </th>
                <td className="l">{method}</td>
                <td className="l" style={{ minWidth: 120 }}>
                  {progress === null ? (
                    size === null && <span className="soft">not begun</span>
                  ) : (
                    <Progress
                      aria-label={`Progress of ${alias}`}
                      value={(100 * progress.step) / Math.max(1, progress.steps)}
                    />
                  )}
                </td>
                <td>{progress && `${count(progress.step)} of ${count(progress.steps)}`}</td>
                <td>
                  {value(progress?.loss)}
                  {progress?.loss_at === 'offset' && (
                    <small>
                      {AT_OFFSET}
                      {progress.weights_loss !== undefined && `, ${value(progress.weights_loss)} ${AT_WEIGHTS}`}
                    </small>
                  )}
                </td>
                <td>
                  {progress && (progress.seconds < 10 ? `${progress.seconds.toFixed(2)}s` : duration(progress.seconds))}
                </td>
                {names.map((name) => (
                  <td key={name}>
                    {value(progress?.values[name])}
                    {progress?.linearized_values?.[name] !== undefined && (
                      <small>{`${value(progress.linearized_values[name])} ${LINEARIZED}`}</small>
                    )}
                  </td>
                ))}
                <td>
                  {size === null ? (
                    <span className="soft">not trained yet</span>
                  ) : (
                    <>
                      <a
                        download
                        href={`${BASE}/v1/finetunes/${finetune.id}/experts/${encodeURIComponent(alias)}/download`}
                      >
                        Download {alias}
                      </a>
                      <small>{bytes(size)}</small>
                    </>
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  )
}
