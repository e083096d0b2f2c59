import type { ReactNode } from 'react'
import { useKeptFocus } from './useKeptFocus'

/** Buttons in a line of a table that come, go and move; each has a `data-place`. The focus stays among them. */
export function KeptRow({ children }: { children: ReactNode }) {
  const row = useKeptFocus<HTMLDivElement>()
  return (
    <div className="row" style={{ flexWrap: 'nowrap' }} {...row}>
      {children}
    </div>
  )
}
