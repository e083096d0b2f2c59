import { type ReactNode, useEffect, useRef, useState } from 'react'

/** Milliseconds between two announcements of a text that changes by itself. */
export const QUIET_MS = 30_000

/**
 * A text that a screen reader announces when it changes: at once after the reader has changed `cause`, such as a
 * filter, and otherwise at most every 30 s. The text itself is always the present one.
 */
export function Status({ text, cause = '', children }: { text: string; cause?: string; children?: ReactNode }) {
  const [isQuiet, setIsQuiet] = useState(false)
  const [times, setTimes] = useState(0)
  const state = useRef({ isCaused: true, hasMissed: false, timer: undefined as number | undefined })
  useEffect(() => {
    state.current.isCaused = true
    setIsQuiet(false)
  }, [cause])
  useEffect(() => {
    const now = state.current
    if (now.isCaused) {
      now.isCaused = false
    } else if (now.timer !== undefined) {
      now.hasMissed = true
    } else {
      setIsQuiet(true)
      now.timer = window.setTimeout(() => {
        now.timer = undefined
        setIsQuiet(false)
        // The text anew, so that what has changed meanwhile is announced.
        if (now.hasMissed) setTimes((n) => n + 1)
        now.hasMissed = false
      }, QUIET_MS)
    }
  }, [text])
  useEffect(() => () => window.clearTimeout(state.current.timer), [])
  return (
    <p className="soft" role="status" aria-live={isQuiet ? 'off' : 'polite'}>
      <span key={times}>{text}</span>
      {children}
    </p>
  )
}
