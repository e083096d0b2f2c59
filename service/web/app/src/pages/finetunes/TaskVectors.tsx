import { useCallback, useMemo } from 'react'
import type { Analysis } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { type Palette, axis } from '../../charts/palette'
import { percent, value } from '../../format'
import { density, middles } from './density'

type Fleet = Analysis['fleets'][number]
type TaskVector = Fleet['task_vectors'][number]

const NAMES = { laplace: 'Laplace', gaussian: 'Gauss' }

/** Elements of each expert's task vector as a histogram, with the distributions that were fitted to them. */
export function TaskVectors({ analysis }: { analysis: Analysis }) {
  const shown = analysis.fleets.flatMap((fleet) =>
    vectorsOf(fleet).map((vector) => ({
      vector,
      label: analysis.fleets.length > 1 ? `${vector.expert}, ${fleet.name}` : vector.expert,
    })),
  )
  return (
    <section aria-labelledby="task-vectors">
      <h3 id="task-vectors">Task vectors</h3>
      <p className="soft">
        Elements of expert minus base. Those that are exactly 0 are left out of the charts. The distance is the
        Kolmogorov-Smirnov statistic; the log-likelihood is a mean over the elements.
      </p>
      <div className="halves">
        {shown.map(({ vector, label }) => (
          <Histogram key={label} vector={vector} label={label} />
        ))}
      </div>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Fitted distributions">
        <table className="data">
          <thead>
            <tr>
              <th scope="col" className="l">
                expert
              </th>
              <th scope="col" className="l">
                distribution
              </th>
              <th scope="col">scale</th>
              <th scope="col">distance</th>
              <th scope="col">log-likelihood</th>
              <th scope="col">exactly 0</th>
            </tr>
          </thead>
          <tbody>
            {shown.flatMap(({ vector, label }) =>
              vector.fits.map((fit) => (
                <tr key={`${label} ${fit.distribution}`}>
                  <th scope="row" className="l">
                    {label}
                  </th>
                  <td className="l">{NAMES[fit.distribution]}</td>
                  <td>{fit.scale.toExponential(2)}</td>
                  <td>{value(fit.distance)}</td>
                  <td>{value(fit.log_likelihood)}</td>
                  <td>{percent(fit.zeros)}</td>
                </tr>
              )),
            )}
          </tbody>
        </table>
      </div>
    </section>
  )
}

/** Task vectors of a fleet, and their sum if it was analysed. */
function vectorsOf({ task_vectors, accumulated }: Fleet): TaskVector[] {
  return accumulated === undefined ? task_vectors : [...task_vectors, accumulated]
}

function Histogram({ vector, label }: { vector: TaskVector; label: string }) {
  const rows = useMemo(() => {
    const fits = vector.fits.map((fit) => ({ name: NAMES[fit.distribution], fit }))
    return {
      fits,
      points: middles(vector.edges).map((x, k) => ({
        x,
        measured: vector.density[k]!,
        fitted: fits.map(({ fit }) => density(fit, x)),
      })),
    }
  }, [vector])
  const option = useCallback(
    (p: Palette) => {
      const colors = [p.warm, p.good]
      const dashes = ['dashed', 'dotted']
      const top = Math.max(...rows.points.flatMap(({ measured, fitted }) => [measured, ...fitted]))
      // As in the report: densities far below the largest one are left out.
      const floor = 10 ** (Math.floor(Math.log10(top)) - 5)
      const inside = (x: number, y: number) => [x, y >= floor ? y : null]
      return {
        grid: { left: 60, right: 16, top: 30, bottom: 42 },
        legend: { top: 0, textStyle: { color: p.soft } },
        tooltip: { trigger: 'axis', confine: true, valueFormatter: (y: unknown) => Number(y).toPrecision(3) },
        xAxis: axis(p, 'element', { splitLine: { show: false } }),
        yAxis: axis(p, 'density', { type: 'log', min: floor, nameGap: 42 }),
        series: [
          {
            type: 'line',
            name: 'task vector',
            step: 'middle',
            symbol: 'none',
            lineStyle: { color: p.accent, width: 1.5 },
            itemStyle: { color: p.accent },
            data: rows.points.map(({ x, measured }) => inside(x, measured)),
          },
          ...rows.fits.map(({ name }, k) => ({
            type: 'line',
            name,
            symbol: 'none',
            lineStyle: { color: colors[k % 2], width: 1.5, type: dashes[k % 2] },
            itemStyle: { color: colors[k % 2] },
            data: rows.points.map(({ x, fitted }) => inside(x, fitted[k]!)),
          })),
        ],
      }
    },
    [rows],
  )
  const best = vector.fits.toSorted((a, b) => a.distance - b.distance)[0]
  return (
    <EChart
      label={label}
      describe={best ? `Closest distribution: ${NAMES[best.distribution]}, distance ${value(best.distance)}.` : ''}
      option={option}
      height={240}
      table={() => ({
        head: ['element', 'density', ...rows.fits.map(({ name }) => name)],
        rows: rows.points.map(({ x, measured, fitted }) => [x, measured, ...fitted].map((y) => y.toPrecision(3))),
      })}
    />
  )
}
