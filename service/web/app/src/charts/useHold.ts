import { useRef, useState } from 'react'

/** What a chart tells of newer data that it holds back, and how it follows the reader. */
export interface Hold {
  isBehind: boolean
  /** Number of trials that are new; 0 if it is not known. */
  numNew: number
  /** Shows the newer data. */
  show: () => void
  /** The pointer, or the focus of the keyboard, has come to the chart or has left it. */
  follow: (by: 'pointer' | 'focus', isThere: boolean) => void
}

/**
 * Holds back newer data of a chart while the reader is on it, so that no point moves under the pointer. Returns the
 * data to show, and what `Held` needs.
 *
 * Data are compared by identity. Where the reader has chosen other data, `key` is another one: they are shown at once.
 * `count` is the number of trials in the data.
 */
export function useHold<T>(
  latest: T,
  { key = '', count }: { key?: string; count?: (data: T) => number } = {},
): [T, Hold] {
  const there = useRef({ pointer: false, focus: false })
  const [held, setHeld] = useState<{ data: T; key: string }>()
  if (held !== undefined && held.key !== key) setHeld({ data: latest, key })
  const shown = held !== undefined && held.key === key ? held.data : latest
  const follow: Hold['follow'] = (by, isThere) => {
    there.current[by] = isThere
    if (there.current.pointer || there.current.focus) setHeld((old) => old ?? { data: latest, key })
    else setHeld(undefined)
  }
  const isBehind = shown !== latest
  const numNew = isBehind && count ? Math.max(0, count(latest) - count(shown)) : 0
  return [shown, { isBehind, numNew, show: () => setHeld({ data: latest, key }), follow }]
}
