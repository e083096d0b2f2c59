import { NativeSelect, TextInput } from '@mantine/core'
import { useState } from 'react'
import { type Schema, entered, inputOf, shown } from './schema'

/** Id of the form's element for a field of the study file, such as search.seed. */
export const idOf = (field: string) => `field-${field}`

/** Text of the form that a parent receives when it changes, without being reformatted while it is written. */
export function Draft(props: {
  id: string
  label: string
  description?: string
  placeholder?: string
  error?: string
  value: string
  /** Called with each change, or only at the end (when the focus leaves the field). */
  onChange: (text: string) => void
  isLate?: boolean
  isNumber?: boolean
}) {
  const { id, label, description, placeholder, error, value, onChange, isLate, isNumber } = props
  const [draft, setDraft] = useState<string>()
  const end = () => {
    if (isLate && draft !== undefined && draft !== value) onChange(draft)
    setDraft(undefined)
  }
  return (
    <TextInput
      id={id}
      label={label}
      description={description}
      placeholder={placeholder}
      error={error}
      inputMode={isNumber ? 'decimal' : undefined}
      autoComplete="off"
      value={draft ?? value}
      onChange={(event) => {
        setDraft(event.currentTarget.value)
        if (!isLate) onChange(event.currentTarget.value)
      }}
      onBlur={end}
    />
  )
}

/** One value of the study file, entered as its schema says; nothing for values that only the text has. */
export function Field(props: {
  field: string
  label: string
  schema: Schema
  value: unknown
  error?: string
  onChange: (value: unknown) => void
}) {
  const { field, label, schema, value, error, onChange } = props
  const input = inputOf(schema)
  const id = idOf(field)
  const help = schema.description?.replaceAll('\n', ' ')
  const usual = shown(schema.default)
  if (input === null || (typeof value === 'object' && value !== null && !Array.isArray(value))) {
    return value === undefined ? null : <Elsewhere id={id} label={label} error={error} />
  }
  if (input.kind === 'choice' || input.kind === 'flag') {
    const options = input.kind === 'flag' ? ['true', 'false'] : input.options
    const given = shown(value)
    const unknown = given !== '' && !options.includes(given) ? [given] : []
    const none = { value: '', label: usual === '' ? 'default' : `default: ${usual}` }
    return (
      <NativeSelect
        id={id}
        label={label}
        description={help}
        error={error}
        data={[none, ...[...unknown, ...options].map((each) => ({ value: each, label: each }))]}
        value={given}
        onChange={(event) => onChange(entered(input, event.currentTarget.value))}
      />
    )
  }
  return (
    <Draft
      id={id}
      label={label}
      description={help}
      placeholder={usual === '' ? undefined : `default: ${usual}`}
      error={error}
      isNumber={input.kind === 'number'}
      value={shown(value)}
      onChange={(text) => onChange(entered(input, text))}
    />
  )
}

/** A value that the form does not show, such as a reference to another study. */
export function Elsewhere({ id, label, error }: { id: string; label: string; error?: string }) {
  return (
    <p id={id} tabIndex={-1} className="soft" style={{ margin: 0 }}>
      <strong>{label}</strong>: edited in the text{error && `. ${error}`}
    </p>
  )
}
