import { expect, test } from 'vitest'
import { messagesOf, partsOf } from './completions'

const chunk = (content: string, finish_reason: string | null = null) =>
  `data: ${JSON.stringify({ choices: [{ delta: { content }, finish_reason }] })}\n\n`

function streamOf(...pieces: string[]): ReadableStream<Uint8Array> {
  const encoder = new TextEncoder()
  return new ReadableStream({
    start(controller) {
      for (const piece of pieces) controller.enqueue(encoder.encode(piece))
      controller.close()
    },
  })
}

async function read(...pieces: string[]) {
  const parts = []
  for await (const part of partsOf(streamOf(...pieces))) parts.push(part)
  return parts
}

test('an answer is read wherever the network cuts it', async () => {
  const whole = `${chunk('five')}${chunk(' or six', 'length')}data: [DONE]\n\n`
  const expected = [
    { text: 'five', isCut: false },
    { text: ' or six', isCut: true },
  ]
  for (let at = 1; at < whole.length; at++) expect(await read(whole.slice(0, at), whole.slice(at))).toEqual(expected)
})

test('an error within a stream, and a stream that ends early, are errors', async () => {
  await expect(read(chunk('a'), 'data: {"error": {"message": "waiting for a free GPU"}}\n\n')).rejects.toThrow(
    'waiting for a free GPU',
  )
  await expect(read(chunk('a'))).rejects.toThrow('before the answer did')
})

test('turns that failed are not sent again', () => {
  const turns = [
    { prompt: 'a', answer: 'b' },
    { prompt: 'c', answer: 'd', problem: 'the engine is gone' },
    { prompt: 'e', answer: '' },
  ]
  expect(messagesOf(turns, 'f').map(({ content }) => content)).toEqual(['a', 'b', 'f'])
})
