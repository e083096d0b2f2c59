import { QueryClient, QueryClientProvider } from '@tanstack/react-query'
import { cleanup, render, screen } from '@testing-library/react'
import { afterEach, expect, test, vi } from 'vitest'
import { plot } from '../../api/queries'
import type { Study } from '../../api/types'
import { Policies } from './Policies'

// Canvas is not here: what the charts say is enough.
vi.mock('../../charts/EChart', () => ({
  EChart: ({ label, describe }: { label: string; describe: string }) => <p>{`${label}: ${describe}`}</p>,
}))

afterEach(cleanup)

function show(algorithm: string, policies: object[]) {
  const client = new QueryClient({ defaultOptions: { queries: { staleTime: Infinity, retry: false } } })
  client.setQueryData<object>(plot('a', 'policies').queryKey, { plot: 'policies', policies, mean: [] })
  render(
    <QueryClientProvider client={client}>
      <Policies study={{ id: 'a', algorithm } as Study} />
    </QueryClientProvider>,
  )
}

const updated = {
  name: 'policy 0',
  preference: {},
  iterations: [{ iteration: 0, outcome: 0.5, outcome_std: 0, length: 7, statistics: { kl: 0.0125, clipped: 0.25 } }],
}

test('the policies of a study have charts of their outcome, KL divergence and clipped share', () => {
  show('hm3', [updated])
  for (const told of ['outcome 0.500', 'KL divergence 0.013', 'share clipped 0.250'])
    expect(screen.getByText(new RegExp(`policy 0: ${told} in iteration 1`))).toBeTruthy()
})

test('before the first update this is said, and another searcher has no policies', () => {
  show('hm3', [])
  expect(screen.getByText('No policy has been updated yet.')).toBeTruthy()
  cleanup()
  show('smac', [])
  expect(screen.queryByText('Policies')).toBeNull()
})
