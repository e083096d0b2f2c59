import { Button, TextInput } from '@mantine/core'
import { type ReactNode, useId, useLayoutEffect, useRef, useState } from 'react'
import { Failure } from './Answer'

/**
 * A dialog that asks before something is done that cannot be undone. With `name`, the button works once the name has
 * been typed. `error` is what the server answered, if it refused.
 */
export function Confirm(props: {
  title: string
  verb: string
  name?: string
  isPending: boolean
  error: Error | null
  onConfirm: () => void
  onClose: () => void
  children: ReactNode
}) {
  const { title, verb, name, isPending, error, onConfirm, onClose, children } = props
  const dialog = useRef<HTMLDialogElement>(null)
  const [typed, setTyped] = useState('')
  const id = useId()
  // Before the dialog leaves the document: only closing gives the focus back to the button that opened it.
  useLayoutEffect(() => {
    const shown = dialog.current
    shown?.showModal()
    return () => shown?.close()
  }, [])
  const isReady = !isPending && (name === undefined || typed === name)
  return (
    <dialog ref={dialog} aria-labelledby={id} onCancel={onClose}>
      <form
        method="dialog"
        onSubmit={(event) => {
          event.preventDefault()
          if (isReady) onConfirm()
        }}
      >
        <h2 id={id}>{title}</h2>
        {children}
        {name !== undefined && (
          <TextInput
            label={
              <>
                Type <strong>{name}</strong> to confirm
              </>
            }
            autoComplete="off"
            value={typed}
            onChange={(event) => setTyped(event.currentTarget.value)}
          />
        )}
        {error && <Failure error={error} />}
        <div className="row" style={{ marginTop: 14 }}>
          <Button type="submit" color="red" variant="outline" disabled={!isReady}>
            {verb}
          </Button>
          <Button variant="default" onClick={onClose}>
            Keep
          </Button>
        </div>
      </form>
    </dialog>
  )
}
