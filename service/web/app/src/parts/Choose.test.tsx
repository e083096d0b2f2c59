// @vitest-environment happy-dom
import { MantineProvider } from '@mantine/core'
import { cleanup, render, screen } from '@testing-library/react'
import { afterEach, expect, test } from 'vitest'
import { ChooseObjective } from './Choose'

afterEach(cleanup)

const show = (names: string[]) =>
  render(
    <MantineProvider>
      <ChooseObjective names={names} value={names[0]!} onChange={() => {}} />
    </MantineProvider>,
  )

test('few short names are buttons', () => {
  show(['mean', 'math', 'text'])
  expect(screen.getAllByRole('radio')).toHaveLength(3)
})

test('long names, which a narrow window has no room for, are a list', () => {
  show(['mean', 'instruction_following', 'mathematics'])
  expect(screen.queryAllByRole('radio')).toHaveLength(0)
  expect(screen.getByRole('combobox', { name: 'Objective' })).toBeDefined()
})
