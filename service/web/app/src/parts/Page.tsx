import { type ReactNode, useEffect, useRef } from 'react'

/** Heading and content of a page; the heading gets the focus after navigation, and names the browser's tab. */
export function Page({ title, before, children }: { title: string; before?: ReactNode; children: ReactNode }) {
  const heading = useRef<HTMLHeadingElement>(null)
  useEffect(() => {
    document.title = `${title} · mergesearch`
    // Not at the first page, where a reader begins at the top.
    if (document.documentElement.dataset.navigated) heading.current?.focus()
    document.documentElement.dataset.navigated = 'yes'
  }, [title])
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
