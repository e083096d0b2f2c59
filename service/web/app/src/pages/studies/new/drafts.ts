/** Texts of study files and specifications that were left without being submitted. */
import { useEffect, useState } from 'react'

/** Texts that were left, by the name of what they began from; as long as the tab is open. */
export const drafts = new Map<string, string>()

/** A text that begins with `start`, or as it was left. */
export function useDraft(name: string, start: string) {
  const [text, setText] = useState(drafts.get(name) ?? start)
  useEffect(() => {
    if (text === start) drafts.delete(name)
    else drafts.set(name, text)
  }, [name, text, start])
  return [text, setText] as const
}
