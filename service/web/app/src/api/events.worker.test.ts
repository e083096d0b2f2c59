import { expect, test, vi } from 'vitest'
import type { Heard, Said } from './events.worker'

/** The streams that are open, by address. */
const open = new Map<string, FakeSource>()

class FakeSource {
  onopen = () => {}
  private readonly listeners = new Map<string, (event: unknown) => void>()
  constructor(private readonly url: string) {
    open.set(url, this)
  }
  addEventListener(kind: string, listener: (event: unknown) => void) {
    this.listeners.set(kind, listener)
  }
  say(kind: string, data = '') {
    this.listeners.get(kind)!({ data, lastEventId: '' })
  }
  close() {
    open.delete(this.url)
  }
}

vi.stubGlobal('EventSource', FakeSource)
await import('./events.worker')

/** A tab: says something, and has what it has heard as texts. */
function tab() {
  const heard: string[] = []
  const port = {
    onmessage: undefined as unknown as (event: { data: Said }) => void,
    postMessage: ({ address, kind, data }: Heard) => heard.push(`${address} ${kind} ${data}`.trim()),
  }
  ;(self as unknown as { onconnect: (event: unknown) => void }).onconnect({ ports: [port] })
  return { heard, say: (data: Said) => port.onmessage({ data }) }
}

test('at most four streams are open, and the others wait for their turn', () => {
  const tabs = ['a', 'b', 'c', 'd', 'e', 'f'].map((address) => {
    const made = tab()
    made.say({ join: address, after: 7 })
    return made
  })
  expect([...open.keys()]).toEqual(['a?after=7', 'b?after=7', 'c?after=7', 'd?after=7'])
  expect(tabs[4]!.heard).toEqual(['e connection waiting'])
  tabs[1]!.say({ leave: 'b' })
  expect([...open.keys()]).toEqual(['a?after=7', 'c?after=7', 'd?after=7', 'e?after=7'])
  open.get('e?after=7')!.onopen()
  expect(tabs[4]!.heard.slice(1)).toEqual(['e connection connecting', 'e connection live'])
  open.get('a?after=7')!.say('end')
  expect(tabs[0]!.heard.slice(-2)).toEqual(['a end', 'a connection ended'])
  expect([...open.keys()]).toEqual(['c?after=7', 'd?after=7', 'e?after=7', 'f?after=7'])
})
