import { useCallback, useEffect, useRef, useState } from 'react'
import { type Options, type Turn, answerOf, messagesOf } from './completions'

type Chats = Readonly<Record<string, readonly Turn[]>>

/**
 * Chats with trials of a served study, one for each trial. `send` asks several trials at the same time; `stop` keeps
 * what they have answered so far.
 */
export function useChat(served: string) {
  const [chats, setChats] = useState<Chats>({})
  const [isBusy, setIsBusy] = useState(false)
  const running = useRef<AbortController>(null)
  useEffect(() => () => running.current?.abort(), [])

  const send = useCallback(
    async (trials: readonly string[], prompt: string, options: Options) => {
      const control = new AbortController()
      running.current = control
      setIsBusy(true)
      const ask = async (trial: string) => {
        const change = (changed: (turn: Turn) => Turn) =>
          setChats((all) => ({ ...all, [trial]: (all[trial] ?? []).with(-1, changed(all[trial]!.at(-1)!)) }))
        setChats((all) => ({ ...all, [trial]: [...(all[trial] ?? []), { prompt, answer: '' }] }))
        try {
          const messages = messagesOf(chats[trial] ?? [], prompt)
          for await (const { text, isCut } of answerOf(served, trial, messages, options, control.signal)) {
            if (control.signal.aborted) return
            change((turn) => ({ ...turn, answer: turn.answer + text, isCut }))
          }
        } catch (error) {
          if (!control.signal.aborted) change((turn) => ({ ...turn, problem: (error as Error).message }))
        }
      }
      await Promise.all(trials.map(ask))
      if (running.current === control) setIsBusy(false)
    },
    [served, chats],
  )
  const stop = () => {
    running.current?.abort()
    setIsBusy(false)
  }
  const clear = () => {
    stop()
    running.current = null
    setChats({})
  }
  return { chats, isBusy, send, stop, clear }
}
