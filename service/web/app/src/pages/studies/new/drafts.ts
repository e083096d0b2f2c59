/** Texts of study files and specifications that were left without being submitted, as long as the tab is open. */
import { useCallback, useEffect, useState } from 'react'
import { useSession } from '../../../api/session'

const PREFIX = 'draft '

/** Keeps a text in the tab, also when the page is loaded anew, as at a login; without a text, forgets it. */
export function keep(key: string, text: string | undefined): void {
  try {
    if (text === undefined) sessionStorage.removeItem(PREFIX + key)
    else sessionStorage.setItem(PREFIX + key, text)
  } catch {
    // A browser may refuse to store a very long text, or any.
  }
}

/** The text that was kept, or null. */
export function kept(key: string): string | null {
  try {
    return sessionStorage.getItem(PREFIX + key)
  } catch {
    return null
  }
}

/**
 * A text that begins with `start`, or as the same user left it; `name` is what it began from. The third value forgets
 * the text once it is submitted.
 */
export function useDraft(name: string, start: string) {
  const { user } = useSession()
  const key = JSON.stringify([user?.name ?? null, name])
  const [text, setText] = useState(() => kept(key) ?? start)
  useEffect(() => keep(key, text === start ? undefined : text), [key, text, start])
  const forget = useCallback(() => keep(key, undefined), [key])
  return [text, setText, forget] as const
}
