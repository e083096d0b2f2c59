import { Button } from '@mantine/core'
import { type ReactNode, useState } from 'react'
import { Confirm } from './Confirm'

/** A button that asks in a dialog before it does what cannot be undone. */
export function ConfirmButton(props: {
  /** The verb, which is also the name of the dialog's button. */
  verb: string
  /** The accessible name of the button, and the title of the dialog. */
  label: string
  question: ReactNode
  onConfirm: () => void
}) {
  const { verb, label, question, onConfirm } = props
  const [isAsked, setIsAsked] = useState(false)
  const confirm = () => {
    setIsAsked(false)
    onConfirm()
  }
  return (
    <>
      <Button size="compact-xs" variant="default" aria-label={label} onClick={() => setIsAsked(true)}>
        {verb}
      </Button>
      {isAsked && (
        <Confirm
          title={label}
          verb={verb}
          isPending={false}
          error={null}
          onConfirm={confirm}
          onClose={() => setIsAsked(false)}
        >
          <p>{question}</p>
        </Confirm>
      )}
    </>
  )
}
