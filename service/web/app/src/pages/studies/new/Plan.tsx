import type { Check } from '../../../api/types'
import { bytes, count } from '../../../format'
import { Figures } from '../../../parts/Figures'

type Planned = NonNullable<Check['plan']>

const hours = (x: number) => (x < 10 ? x.toPrecision(2) : count(Math.round(x)))

/** What the study will cost: samples, hours, memory and disk, and the plan as the command prints it. */
export function Plan({ plan, isOld }: { plan: Planned; isOld: boolean }) {
  const { search, holdout } = plan.samples as Record<string, number>
  const { needed, available } = plan.memory_bytes
  const disk = plan.disk_bytes
  return (
    <div role="status" aria-label="Plan">
      <p>{isOld ? 'The text was changed since this check.' : '✓ The study can run.'}</p>
      <Figures
        rows={[
          {
            term: 'trials',
            value: count(Object.values(plan.trials).reduce((a, b) => a + b, 0)),
            note: Object.entries(plan.trials)
              .map(([kind, n]) => `${count(n)} ${kind}`)
              .join(', '),
          },
          {
            term: 'samples',
            value: count(search ?? 0),
            note: holdout ? `and ${count(holdout)} of held-out data` : undefined,
          },
          { term: 'hours', value: `${hours(plan.hours.least)} to ${hours(plan.hours.most)}` },
          {
            term: 'memory',
            value: bytes(needed ?? 0),
            note: available === undefined ? undefined : `${bytes(available)} available`,
          },
          {
            term: 'disk',
            value: bytes((disk.export ?? 0) + (disk.download ?? 0)),
            note: disk.available === undefined ? undefined : `${bytes(disk.available)} available`,
          },
        ]}
      />
      {plan.absent_models.length > 0 && <p>Downloaded first: {plan.absent_models.join(', ')}</p>}
      <details>
        <summary>The plan in words</summary>
        <pre>{plan.text}</pre>
      </details>
    </div>
  )
}
