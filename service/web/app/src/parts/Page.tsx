import { useLocation, useMatches } from '@tanstack/react-router'
import { type ReactNode, useEffect, useRef } from 'react'

// Milliseconds in which the heading of a view is waited for, while its code and data are loaded.
const HEADING_MS = 5000

/**
 * Heading and content of a page. After navigation the heading gets the focus: that of the page or, for a view within
 * the page, the first heading of the view. Page and view name the browser's tab.
 */
export function Page({ title, before, children }: { title: string; before?: ReactNode; children: ReactNode }) {
  const heading = useRef<HTMLHeadingElement>(null)
  const view = useMatches({ select: (matches) => matches.at(-1)?.staticData.view })
  const { pathname } = useLocation()
  useEffect(() => {
    document.title = [view, title, 'mergesearch'].filter(Boolean).join(' · ')
  }, [title, view])
  useEffect(() => {
    const { dataset } = document.documentElement
    // Not at the first page, where a reader begins at the top.
    const isFirst = dataset.navigated === undefined
    dataset.navigated = pathname
    if (!isFirst) return focusOn(heading.current!, view)
  }, [pathname, view])
  return (
    <>
      {before}
      <h1 ref={heading} tabIndex={-1}>
        {title}
      </h1>
      {children}
    </>
  )
}

/** Focuses a page's heading, or that of a view as soon as it is there, unless the reader goes elsewhere meanwhile. */
function focusOn(heading: HTMLHeadingElement, view: string | undefined): (() => void) | undefined {
  heading.focus()
  if (view === undefined) return undefined
  const found = () => {
    const first = heading.parentElement?.querySelector<HTMLHeadingElement>('h1 ~ h2, h1 ~ * h2')
    if (!first || document.activeElement !== heading) return first !== null
    first.tabIndex = -1
    first.focus()
    return true
  }
  if (found()) return undefined
  const observer = new MutationObserver(() => found() && observer.disconnect())
  observer.observe(heading.parentElement!, { childList: true, subtree: true })
  const timer = window.setTimeout(() => observer.disconnect(), HEADING_MS)
  return () => {
    window.clearTimeout(timer)
    observer.disconnect()
  }
}
