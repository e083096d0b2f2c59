import { TextInput } from '@mantine/core'
import { useDebouncedCallback } from '@mantine/hooks'
import { useEffect, useRef } from 'react'

// Milliseconds after the last key until a text counts as typed.
const TYPED_MS = 300

/** A text that is in the address: typing changes it there, and a link that changes it there changes it here. */
export function Filter(props: {
  label: string
  placeholder?: string
  value: string | undefined
  onType: (text: string | undefined) => void
  /** Whether the label is shown above the field. */
  isLabelled?: boolean
  inputMode?: 'numeric'
  error?: string | false
}) {
  const { label, placeholder = label, value, onType, isLabelled, inputMode, error } = props
  const field = useRef<HTMLInputElement>(null)
  const typed = useDebouncedCallback((text: string) => onType(text.trim() || undefined), TYPED_MS)
  useEffect(() => {
    const shown = field.current!
    if (shown !== document.activeElement) shown.value = value ?? ''
  }, [value])
  return (
    <TextInput
      ref={field}
      label={isLabelled ? label : undefined}
      aria-label={isLabelled ? undefined : label}
      placeholder={isLabelled ? undefined : placeholder}
      inputMode={inputMode}
      error={error}
      defaultValue={value}
      onChange={(event) => typed(event.currentTarget.value)}
    />
  )
}
