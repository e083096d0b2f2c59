import { Button } from '@mantine/core'
import { Failure } from './Answer'
import { Page } from './Page'

/** In place of a view that has failed while it was drawn: what failed, and a way to reload the page. */
export function Broken({ error }: { error: unknown }) {
  return (
    <Page title="This view has failed">
      <Failure error={error instanceof Error ? error : new Error(String(error))} />
      <Button variant="default" onClick={() => location.reload()}>
        Reload the page
      </Button>
    </Page>
  )
}
