import { Button, Modal } from '@mantine/core'
import { type ReactNode, useEffect, useState } from 'react'
import { Failure } from './Answer'

/** A dialog with one action, and the server's words if it is refused. */
export function Dialog(props: {
  title: string
  action: string
  isDangerous?: boolean
  isReady?: boolean
  isPending: boolean
  /** What the server answered, if it refused. */
  error: Error | null
  send: () => void
  onClose: () => void
  /** The button that leaves everything as it is. */
  keep?: string
  /** What is shown of a failure in place of the server's words. */
  failure?: ReactNode
  children: ReactNode
}) {
  const { title, action, isDangerous, isReady = true, isPending, error, send, onClose, keep, failure, children } = props
  // The modal gives the focus back only where it is closed before it leaves the document.
  const [before] = useState(() => document.activeElement)
  useEffect(
    () => () => {
      if (before instanceof HTMLElement) before.focus()
    },
    [before],
  )
  return (
    <Modal.Root opened onClose={onClose} transitionProps={{ duration: 0 }}>
      <Modal.Overlay />
      <Modal.Content>
        {/* Not Modal.Header: an element header would be a second banner of the page. */}
        <div className="dialog-head">
          <Modal.Title>{title}</Modal.Title>
          <Modal.CloseButton aria-label="Close" />
        </div>
        <Modal.Body>
          <form
            className="form"
            onSubmit={(event) => {
              event.preventDefault()
              if (isReady) send()
            }}
          >
            {children}
            {failure ?? (error && <Failure error={error} />)}
            <div className="row">
              <Button type="submit" color={isDangerous ? 'red.8' : undefined} loading={isPending} disabled={!isReady}>
                {action}
              </Button>
              <Button variant="default" onClick={onClose}>
                {keep ?? 'Close'}
              </Button>
            </div>
          </form>
        </Modal.Body>
      </Modal.Content>
    </Modal.Root>
  )
}
