import type { components } from '../api/schema'
import { Difference } from './Interval'

type Look = components['schemas']['StopLook']
const MEAN = 'mean'

/** By how much a trial is behind its rival at one rung: in the mean of the objectives, or in each without a mean. */
export function Lead({ look }: { look: Look | undefined }) {
  const all = look?.differences ?? {}
  const names = MEAN in all ? [MEAN] : Object.keys(all)
  return names.map((name) => (
    <div key={name}>
      <span className="soft">{name}</span> <Difference of={all[name]} />
    </div>
  ))
}
