import { act, render, screen } from '@testing-library/react'
import { afterEach, beforeEach, expect, test, vi } from 'vitest'
import { QUIET_MS, Status } from './Status'

beforeEach(() => {
  vi.useFakeTimers()
})
afterEach(() => {
  vi.useRealTimers()
})

const live = () => screen.getByRole('status').getAttribute('aria-live')

test('a text that changes by itself is announced at most every 30 s, and is always the present one', () => {
  const { rerender, unmount } = render(<Status text="1 trial" />)
  expect(live()).toBe('polite')
  rerender(<Status text="2 trials" />)
  expect(live()).toBe('off')
  const before = screen.getByText('2 trials')
  rerender(<Status text="3 trials" />)
  expect(screen.getByRole('status').textContent).toBe('3 trials')
  act(() => vi.advanceTimersByTime(QUIET_MS - 1))
  expect(live()).toBe('off')
  act(() => vi.advanceTimersByTime(1))
  expect(live()).toBe('polite')
  expect(screen.getByText('3 trials')).not.toBe(before) // it is there anew, and so announced
  unmount()
})

test('what the reader causes is announced at once', () => {
  const { rerender, unmount } = render(<Status text="9 trials" cause="" />)
  rerender(<Status text="10 trials" cause="" />)
  expect(live()).toBe('off')
  rerender(<Status text="10 trials" cause="rung=1" />)
  expect(live()).toBe('polite')
  rerender(<Status text="4 trials" cause="rung=1" />)
  expect(live()).toBe('polite')
  unmount()
})
