import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useCallback, useState } from 'react'
import { stops } from '../../api/queries'
import type { components } from '../../api/schema'
import type { ShownTrial, Study } from '../../api/types'
import { EChart } from '../../charts/EChart'
import { drawInterval } from '../../charts/intervals'
import { type Palette, axis } from '../../charts/palette'
import { count, signed } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { ChooseObjective } from '../../parts/Choose'
import { Lead } from '../../parts/Lead'

type Look = components['schemas']['StopLook']
const MEAN = 'mean'

/** Against which rival a trial was stopped, and the paired difference from the rival at each rung. */
export function Stopped({ study, trial }: { study: Study; trial: ShownTrial }) {
  const query = useQuery(stops(study.id, { trial: trial.number }))
  return (
    <section aria-labelledby="stopped">
      <h2 id="stopped">Why it was stopped</h2>
      <Answer of={query}>
        {({ trials: [found] }) =>
          found && <Looks study={study} trial={trial} rival={found.rival!} looks={found.looks} />
        }
      </Answer>
    </section>
  )
}

function Looks(props: { study: Study; trial: ShownTrial; rival: number; looks: readonly Look[] }) {
  const { study, trial, rival, looks } = props
  const last = looks.at(-1)
  const found = new Set(looks.flatMap((look) => Object.keys(look.differences)))
  const names = [MEAN, ...study.objectives.map((each) => each.name)].filter((each) => found.has(each))
  const [chosen, setChosen] = useState<string>()
  const name = chosen ?? names[0]
  const { id } = study
  const to = { id, number: `${rival}` }
  return (
    <>
      <p>
        It was stopped at rung {last?.rung} against{' '}
        <Link to="/studies/$id/trials/$number" params={to}>
          trial {rival}
        </Link>
        {trial.reason && `: ${trial.reason}`}. The{' '}
        <Link
          to="/studies/$id/trials/$number/samples"
          params={{ id, number: `${trial.number}` }}
          search={{ against: `${rival}` }}
        >
          answers of both, side by side
        </Link>
        .
      </p>
      {name === undefined || last === undefined ? (
        <Nothing>No sample is stored for both trials, so that there is no paired difference.</Nothing>
      ) : (
        <>
          <div data-testid="lead">
            Minus trial {rival}, on {count(last.samples)} samples of each objective: <Lead look={last} />
          </div>
          <ChooseObjective names={names} value={name} onChange={setChosen} />
          <Chart name={name} rival={rival} looks={looks} isLess={isLess(study, name)} />
        </>
      )}
    </>
  )
}

const isLess = (study: Study, name: string) =>
  study.objectives.find((each) => each.name === name)?.direction === 'minimize'

/** The next number of two significant digits, so that the axis ends at a short one. */
function outward(x: number, round: (x: number) => number): number {
  if (x === 0) return 0
  const unit = 10 ** (Math.floor(Math.log10(Math.abs(x))) - 1)
  return Number((round(x / unit) * unit).toPrecision(3))
}

/** The difference at each rung, with its interval. */
function Chart(props: { name: string; rival: number; looks: readonly Look[]; isLess: boolean }) {
  const { name, rival, looks, isLess: less } = props
  const shown = looks.flatMap((look) => {
    const difference = look.differences[name]
    return difference ? [{ ...look, difference, ends: difference.ci95 as [number, number] }] : []
  })
  const key = JSON.stringify(shown)
  const option = useCallback(
    (p: Palette) => ({
      grid: { left: 62, right: 16, top: 12, bottom: 42 },
      xAxis: axis(p, 'samples of each objective', {
        type: 'category',
        data: shown.map((look) => count(look.samples)),
        splitLine: { show: false },
      }),
      yAxis: axis(p, `${name} minus trial ${rival}`, {
        nameGap: 48,
        min: ({ min }: { min: number }) => Math.min(0, outward(min, Math.floor)),
        max: ({ max }: { max: number }) => Math.max(0, outward(max, Math.ceil)),
      }),
      series: [
        {
          type: 'custom',
          itemStyle: { color: p.accent },
          encode: { x: 0, y: [1, 2, 3] },
          data: shown.map(({ difference, ends }, k) => [k, difference.value, ...ends]),
          renderItem: drawInterval('y'),
          markLine: {
            silent: true,
            symbol: 'none',
            label: { show: false },
            lineStyle: { color: p.ink, type: 'solid' },
            data: [{ yAxis: 0 }],
          },
        },
      ],
    }),
    // oxlint-disable-next-line react-hooks/exhaustive-deps
    [key, name, rival],
  )
  const said = shown.map(({ samples, difference }) => `${signed(difference.value)} on ${count(samples)} samples`)
  return (
    <EChart
      label={`Difference from trial ${rival} at each rung: ${name}, with 95 % intervals`}
      describe={`${said.join('; ')}. ${less ? 'Above' : 'Below'} 0 the rival is better.`}
      option={option}
      height={240}
      table={() => ({
        head: ['rung', 'samples', `${name} minus trial ${rival}`, '95 % interval', 'better'],
        rows: shown.map(({ rung, samples, difference, ends }) => [
          rung,
          count(samples),
          signed(difference.value),
          `${signed(ends[0])} to ${signed(ends[1])}`,
          ends[0] <= 0 && ends[1] >= 0 ? 'not decided' : difference.value > 0 !== less ? 'the trial' : 'the rival',
        ]),
      })}
    />
  )
}
