import { Alert, Button } from '@mantine/core'
import type { UseQueryResult } from '@tanstack/react-query'
import type { ReactNode } from 'react'
import { Refused } from '../api/client'
import { Page } from './Page'

/**
 * What a query's answer shows; before the answer that it loads, and after a failure what failed and a way to retry.
 * Where the answer is a whole page, `title` is the heading of the page without one.
 */
export function Answer<T>(props: { of: UseQueryResult<T>; title?: string; children: (data: T) => ReactNode }) {
  const { of: query, title, children } = props
  if (query.data !== undefined) {
    return (
      <>
        {query.isError && <Failure error={query.error} isOld retry={() => query.refetch()} />}
        {children(query.data)}
      </>
    )
  }
  if (query.isError) {
    const failure = <Failure error={query.error} retry={() => query.refetch()} />
    return title === undefined ? failure : <Page title={title}>{failure}</Page>
  }
  return (
    <p role="status" className="soft">
      Loading
    </p>
  )
}

/** A failed request: the server's own words, and each problem with its field. */
export function Failure({ error, retry, isOld }: { error: Error; retry?: () => void; isOld?: boolean }) {
  const problems = error instanceof Refused ? (error.problem.problems ?? []) : []
  const title = error instanceof Refused ? error.problem.title : 'No answer'
  return (
    <Alert color="red" variant="outline" title={<span className="bad">{title}</span>} my="sm">
      <p style={{ margin: 0 }}>
        {error.message}
        {isOld && '. What is shown below is older.'}
      </p>
      {problems.length > 0 && (
        <ul>
          {problems.map((problem) => (
            <li key={problem.field + problem.message}>
              <strong>{problem.field}</strong>: {problem.message}
            </li>
          ))}
        </ul>
      )}
      {retry && (
        <Button size="xs" variant="default" mt="xs" onClick={retry}>
          Try again
        </Button>
      )}
    </Alert>
  )
}

/** A sentence in place of a view that has nothing to show. */
export function Nothing({ children }: { children: ReactNode }) {
  return <p className="soft">{children}</p>
}
