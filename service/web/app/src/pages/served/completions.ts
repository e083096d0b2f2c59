import { api } from '../../api/client'

/** A prompt and what a trial answered so far. `problem` is why the answer is missing or incomplete. */
export interface Turn {
  prompt: string
  answer: string
  problem?: string
  /** Whether the answer ended because it had as many tokens as were allowed. */
  isCut?: boolean
}

export interface Options {
  temperature?: number
  max_tokens?: number
}

/** What one event of a stream adds to an answer. */
export interface Part {
  text: string
  isCut: boolean
}

/** Messages of a chat: turns with an answer, and a prompt that has none yet. Turns that failed are left out. */
export function messagesOf(turns: readonly Turn[], prompt: string) {
  const answered = turns.filter(({ answer, problem }) => answer !== '' && problem === undefined)
  return [
    ...answered.flatMap((turn) => [
      { role: 'user' as const, content: turn.prompt },
      { role: 'assistant' as const, content: turn.answer },
    ]),
    { role: 'user' as const, content: prompt },
  ]
}

/**
 * The parts of an answer, as they come: server-sent events in the form of OpenAI's API. Throws what an event has as an
 * error, and if the stream ends before the answer does.
 */
export async function* partsOf(stream: ReadableStream<Uint8Array>): AsyncGenerator<Part> {
  const reader = stream
    .pipeThrough(new TextDecoderStream() as unknown as TransformStream<Uint8Array, string>)
    .getReader()
  let rest = ''
  try {
    for (;;) {
      const { value, done } = await reader.read()
      if (done) throw new Error('the connection to the engine ended before the answer did')
      const events = (rest + value).split('\n\n')
      rest = events.pop()!
      for (const event of events) {
        const data = event.replace(/^data: /, '')
        if (data === '[DONE]') return
        const { error, choices } = JSON.parse(data) as {
          error?: { message: string }
          choices?: { delta: { content?: string }; finish_reason: string | null }[]
        }
        if (error !== undefined) throw new Error(error.message)
        const choice = choices?.[0]
        if (choice) yield { text: choice.delta.content ?? '', isCut: choice.finish_reason === 'length' }
      }
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}

/** Asks a trial of a served study to answer the last prompt of a chat; yields the answer's parts as they come. */
export async function* answerOf(
  served: string,
  trial: string,
  messages: ReturnType<typeof messagesOf>,
  options: Options,
  signal: AbortSignal,
): AsyncGenerator<Part> {
  const { data } = await api.POST('/v1/served/{served_id}/openai/v1/chat/completions', {
    params: { path: { served_id: served } },
    body: { model: trial, messages, stream: true, ...options } as never,
    parseAs: 'stream',
    signal,
  })
  yield* partsOf(data as unknown as ReadableStream<Uint8Array>)
}
