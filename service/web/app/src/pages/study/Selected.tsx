import { Button } from '@mantine/core'
import { Link } from '@tanstack/react-router'
import { useRef, useState } from 'react'
import type { Study } from '../../api/types'
import type { Selection } from '../../charts/ranges'
import { count } from '../../format'
import { Status } from '../../parts/Status'
import { overviewRoute } from '../../router'

// Ranges that are named.
const NAMED = 4

/** How many trials the ranges of parameters leave, what the ranges are, and a way to clear them. */
export function Selected(props: {
  study: Study
  ranges: string | undefined
  selection: Selection | undefined
  isLoading: boolean
}) {
  const { study, ranges, selection, isLoading } = props
  const navigate = overviewRoute.useNavigate()
  const said = useRef<HTMLDivElement>(null)
  const [isCleared, setIsCleared] = useState(false)
  const clear = () => {
    setIsCleared(true)
    navigate({ search: (old) => ({ ...old, ranges: undefined }), replace: true })
    said.current?.focus({ preventScroll: true }) // the button goes away
  }
  if (ranges === undefined && !isCleared) return null
  return (
    <>
      <div ref={said} tabIndex={-1}>
        <Status text={ranges === undefined ? 'All trials are shown.' : told(selection, isLoading)} cause={ranges} />
      </div>
      {ranges !== undefined && (
        <div className="row" style={{ marginBottom: 10 }}>
          <Link to="/studies/$id/parameters" params={{ id: study.id }} search={{ ranges }}>
            Change the ranges
          </Link>
          <Button size="xs" variant="default" onClick={clear}>
            Clear the ranges
          </Button>
        </div>
      )}
    </>
  )
}

function told(selection: Selection | undefined, isLoading: boolean): string {
  if (selection === undefined)
    return isLoading
      ? 'Loading the parameters of the ranges'
      : 'No proposed trial has values in which the ranges differ.'
  const { words } = selection
  const others = words.length > NAMED ? ` and ${words.length - NAMED} more` : ''
  return `${numbers(selection)} in the selected ranges (${words.slice(0, NAMED).join('; ')}${others}). The others are small and pale; lines and baselines are those of all trials.`
}

const numbers = ({ trials, total }: Selection) =>
  `${count(trials.size)} of ${count(total)} proposed trials ${total === 1 ? 'is' : 'are'}`

/** A sentence after others that says how many trials are in the ranges; nothing without ranges. */
export const inRanges = (selection: Selection | undefined) =>
  selection ? ` ${numbers(selection)} in the selected ranges.` : ''
