import { Button } from '@mantine/core'
import type { ReactNode } from 'react'
import { Failure } from './Answer'

/** A form of few fields in a row, with the button that sends it, and what the server answered if it refused. */
export function Fields(props: {
  /** The words of the button. */
  action: string
  isPending?: boolean
  isQuiet?: boolean
  error?: Error | null
  onSubmit: () => void
  /** What follows the button. */
  after?: ReactNode
  children: ReactNode
}) {
  const { action, isPending, isQuiet, error, onSubmit, after, children } = props
  return (
    <>
      <form
        className="fields"
        onSubmit={(event) => {
          event.preventDefault()
          onSubmit()
        }}
      >
        {children}
        <Button type="submit" variant={isQuiet ? 'default' : undefined} loading={isPending}>
          {action}
        </Button>
        {after}
      </form>
      {error && <Failure error={error} />}
    </>
  )
}

/** A secret that the server has made and shows once, in place of the form that asked for it. */
export function Once({ children, onDone }: { children: ReactNode; onDone: () => void }) {
  return (
    <div className="narrow">
      {children}
      <Button size="xs" variant="default" mt="xs" onClick={onDone}>
        Done
      </Button>
    </div>
  )
}
