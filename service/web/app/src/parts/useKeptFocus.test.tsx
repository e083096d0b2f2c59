// @vitest-environment happy-dom
import { cleanup, render, screen } from '@testing-library/react'
import { afterEach, expect, test, vi } from 'vitest'
import { useKeptFocus } from './useKeptFocus'

afterEach(cleanup)

/** Buttons by name, with their places; those that are disabled have a request that runs. */
function Row({ buttons, isBusy }: { buttons: [name: string, place: string][]; isBusy?: boolean }) {
  const row = useKeptFocus<HTMLDivElement>()
  return (
    <>
      <div {...row}>
        {buttons.map(([name, place]) => (
          <button key={name} data-place={place} disabled={isBusy}>
            {name}
          </button>
        ))}
      </div>
      <button>elsewhere</button>
    </>
  )
}

const button = (name: string) => screen.getByRole('button', { name })

test('the button that takes the place of the one with the focus gets it', () => {
  const { rerender } = render(
    <Row
      buttons={[
        ['Cancel', 'cancel'],
        ['Pause', 'pause'],
      ]}
    />,
  )
  button('Pause').focus()
  rerender(
    <Row
      buttons={[
        ['Cancel', 'cancel'],
        ['Resume', 'pause'],
      ]}
    />,
  )
  expect(document.activeElement).toBe(button('Resume'))
})

test('the page is not scrolled to a button that gets the focus back', () => {
  const { rerender } = render(<Row buttons={[['Pause', 'pause']]} />)
  button('Pause').focus()
  const focus = vi.spyOn(HTMLElement.prototype, 'focus')
  rerender(<Row buttons={[['Resume', 'pause']]} />)
  expect(focus.mock.calls).toEqual([[{ preventScroll: true }]])
  focus.mockRestore()
})

test('while the request runs all are disabled, and the focus is given afterwards', () => {
  const { rerender } = render(<Row buttons={[['Pause', 'pause']]} />)
  button('Pause').focus()
  rerender(<Row buttons={[['Pause', 'pause']]} isBusy />)
  button('Pause').blur() // as Chromium does with a button that is disabled
  rerender(<Row buttons={[['Resume', 'pause']]} isBusy />)
  rerender(<Row buttons={[['Resume', 'pause']]} />)
  expect(document.activeElement).toBe(button('Resume'))
})

test('without such a button the first one gets the focus', () => {
  const { rerender } = render(
    <Row
      buttons={[
        ['Pause', 'pause'],
        ['Cancel', 'cancel'],
      ]}
    />,
  )
  button('Cancel').focus()
  rerender(<Row buttons={[['Delete', 'delete']]} />)
  expect(document.activeElement).toBe(button('Delete'))
})

test('who has gone elsewhere keeps the focus there', () => {
  const { rerender } = render(<Row buttons={[['Pause', 'pause']]} />)
  button('Pause').focus()
  button('elsewhere').focus()
  rerender(<Row buttons={[['Resume', 'pause']]} />)
  expect(document.activeElement).toBe(button('elsewhere'))
})

test('who has left the button for nothing is not brought back', async () => {
  const { rerender } = render(<Row buttons={[['Pause', 'pause']]} />)
  button('Pause').focus()
  button('Pause').blur()
  await new Promise((resolve) => setTimeout(resolve))
  rerender(<Row buttons={[['Resume', 'pause']]} />)
  expect(document.activeElement).toBe(document.body)
})
