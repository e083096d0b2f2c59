// @vitest-environment happy-dom
import { MantineProvider } from '@mantine/core'
import { cleanup, fireEvent, render, screen } from '@testing-library/react'
import { afterEach, expect, test } from 'vitest'
import { Held } from './Held'
import { useHold } from './useHold'

afterEach(cleanup)

type Trials = readonly number[]

/** A chart of the numbers of trials; another `name` is another choice of the reader. */
function Chart({ trials, name = 'math', isThere = true }: { trials: Trials; name?: string; isThere?: boolean }) {
  const [shown, hold] = useHold(trials, { key: name, count: (data) => data.length })
  return (
    <MantineProvider>
      {isThere && (
        <Held hold={hold}>
          <div role="img" tabIndex={0} aria-label="chart">
            chart
          </div>
        </Held>
      )}
      <output>{shown.join(' ')}</output>
      <button>elsewhere</button>
    </MantineProvider>
  )
}

const shown = () => document.querySelector('output')!.textContent
const chip = () => screen.queryByRole('button', { name: /show/ })
const chart = () => screen.getByRole('img')

// React makes `pointerenter` of `pointerover`.
const enter = () => fireEvent.pointerOver(chart(), { relatedTarget: document.body })
const leave = () => fireEvent.pointerOut(chart(), { relatedTarget: document.body })

test('without the reader on it a chart has the newest data', () => {
  const { rerender } = render(<Chart trials={[1]} />)
  rerender(<Chart trials={[1, 2]} />)
  expect([shown(), chip()]).toEqual(['1 2', null])
})

test('data that come while the pointer is on the chart wait until it leaves', () => {
  const { rerender } = render(<Chart trials={[1]} />)
  enter()
  rerender(<Chart trials={[1, 2]} />)
  expect([shown(), chip()!.textContent]).toEqual(['1', '1 new trial: show'])
  rerender(<Chart trials={[1, 2, 3]} />)
  expect([shown(), chip()!.textContent]).toEqual(['1', '2 new trials: show'])
  leave()
  expect([shown(), chip()]).toEqual(['1 2 3', null])
})

test('the button shows them, and further ones wait again', () => {
  const { rerender } = render(<Chart trials={[1]} />)
  enter()
  rerender(<Chart trials={[1, 2]} />)
  fireEvent.click(chip()!)
  expect([shown(), chip()]).toEqual(['1 2', null])
  expect(document.activeElement).toBe(chart())
  rerender(<Chart trials={[1, 3]} />)
  expect([shown(), chip()!.textContent]).toEqual(['1 2', 'Newer values: show'])
})

test('the focus of the keyboard holds them back as the pointer does', () => {
  const { rerender } = render(<Chart trials={[1]} />)
  fireEvent.keyDown(chart(), { key: 'ArrowRight' })
  enter()
  leave()
  rerender(<Chart trials={[1, 2]} />)
  expect(shown()).toBe('1')
  fireEvent.focusOut(chart(), { relatedTarget: chip() })
  expect(shown()).toBe('1')
  fireEvent.focusOut(chip()!, { relatedTarget: screen.getByText('elsewhere') })
  expect([shown(), chip()]).toEqual(['1 2', null])
})

test('what the reader has chosen is shown at once, and held back from then on', () => {
  const { rerender } = render(<Chart trials={[1]} />)
  enter()
  rerender(<Chart trials={[7]} name="text" />)
  expect([shown(), chip()]).toEqual(['7', null])
  rerender(<Chart trials={[7, 8]} name="text" />)
  expect(shown()).toBe('7')
})

test('a chart that is removed under the pointer holds nothing back', () => {
  const { rerender } = render(<Chart trials={[1]} />)
  enter()
  rerender(<Chart trials={[1]} isThere={false} />)
  rerender(<Chart trials={[1, 2]} />)
  expect([shown(), chip()]).toEqual(['1 2', null])
})
