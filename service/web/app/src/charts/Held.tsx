import './held.css'
import { Button } from '@mantine/core'
import { type ReactNode, useEffect, useRef } from 'react'
import { count } from '../format'
import type { Hold } from './useHold'

/** A chart whose newer data wait while the reader is on it; a button at its lower edge says so, and shows them. */
export function Held({ hold, children }: { hold: Hold; children: ReactNode }) {
  const { isBehind, numNew, show, follow } = hold
  const box = useRef<HTMLDivElement>(null)
  const latest = useRef(follow)
  useEffect(() => {
    latest.current = follow
  })
  // What is removed is not left by events.
  useEffect(
    () => () => {
      latest.current('pointer', false)
      latest.current('focus', false)
    },
    [],
  )
  const apply = () => {
    show()
    // The button goes away, and the chart gets its focus.
    const chart = box.current?.querySelector<HTMLElement>('[tabindex="0"]') ?? box.current
    chart?.focus({ preventScroll: true })
  }
  return (
    <div
      ref={box}
      className="held"
      tabIndex={-1}
      onPointerEnter={() => follow('pointer', true)}
      onPointerLeave={() => follow('pointer', false)}
      onFocus={({ target }) => target.matches(':focus-visible') && follow('focus', true)}
      onKeyDown={() => follow('focus', true)}
      onBlur={({ currentTarget, relatedTarget }) => currentTarget.contains(relatedTarget) || follow('focus', false)}
    >
      {children}
      {isBehind && (
        <Button className="newer" size="compact-xs" variant="default" onClick={apply}>
          {numNew === 0 ? 'Newer values' : `${count(numNew)} new ${numNew === 1 ? 'trial' : 'trials'}`}: show
        </Button>
      )}
    </div>
  )
}
