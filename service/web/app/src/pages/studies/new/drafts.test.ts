import { afterEach, expect, test, vi } from 'vitest'
import { keep, kept } from './drafts'

afterEach(() => vi.restoreAllMocks())

test('a text is kept until it is forgotten', () => {
  keep('study', 'name: a')
  keep('other', '')
  expect([kept('study'), kept('other'), kept('none')]).toEqual(['name: a', '', null])
  keep('study', undefined)
  expect(kept('study')).toBeNull()
})

test('a browser that stores nothing keeps no text, and the page goes on', () => {
  const refuse = () => {
    throw new DOMException('full', 'QuotaExceededError')
  }
  vi.stubGlobal('sessionStorage', { getItem: refuse, setItem: refuse, removeItem: refuse })
  keep('study', 'name: a')
  keep('study', undefined)
  expect(kept('study')).toBeNull()
  vi.unstubAllGlobals()
})
