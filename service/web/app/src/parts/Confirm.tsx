import { TextInput } from '@mantine/core'
import { type ReactNode, useState } from 'react'
import { Dialog } from './Dialog'

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
  const [typed, setTyped] = useState('')
  return (
    <Dialog
      title={title}
      action={verb}
      isDangerous
      isReady={name === undefined || typed === name}
      isPending={isPending}
      error={error}
      send={onConfirm}
      onClose={onClose}
      keep="Keep"
    >
      <div>{children}</div>
      {name !== undefined && (
        <TextInput
          label={`Type the name, ${name}`}
          autoComplete="off"
          value={typed}
          onChange={(event) => setTyped(event.currentTarget.value)}
          data-autofocus
        />
      )}
    </Dialog>
  )
}
