import { Button, Modal } from '@mantine/core'
import { type UseMutationResult, useMutation, useQueryClient } from '@tanstack/react-query'
import type { ReactNode } from 'react'
import type { Study } from '../../../api/types'
import { Failure } from '../../../parts/Answer'

/** A request that changes a study; afterwards what is shown of it is read again. */
export function useChange<T>(study: Study, request: (given: T) => Promise<unknown>, onDone: () => unknown) {
  const client = useQueryClient()
  return useMutation<unknown, Error, T>({
    mutationFn: request,
    onSuccess: async () => {
      await onDone()
      await Promise.all([
        client.invalidateQueries({ queryKey: ['study', study.id] }),
        client.invalidateQueries({ queryKey: ['studies'] }),
      ])
    },
  })
}

/** A dialog with one action, and the server's words if it is refused. */
export function Dialog<T>(props: {
  title: string
  action: string
  isDangerous?: boolean
  isReady?: boolean
  change: UseMutationResult<unknown, Error, T>
  send: () => void
  onClose: () => void
  /** What is shown of a failure in place of the server's words. */
  failure?: ReactNode
  children: ReactNode
}) {
  const { title, action, isDangerous, isReady = true, change, send, onClose, failure, children } = props
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
            {failure ?? (change.isError && <Failure error={change.error} />)}
            <div className="row">
              <Button
                type="submit"
                color={isDangerous ? 'red.8' : undefined}
                loading={change.isPending}
                disabled={!isReady}
              >
                {action}
              </Button>
              <Button variant="default" onClick={onClose}>
                Close
              </Button>
            </div>
          </form>
        </Modal.Body>
      </Modal.Content>
    </Modal.Root>
  )
}
