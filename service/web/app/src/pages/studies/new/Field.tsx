import { NativeSelect, TextInput, Textarea } from '@mantine/core'
import { useState } from 'react'
import { type Input, type Schema, canShow, entered, inputOf, shown } from './schema'

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
  isOfLines?: boolean
}) {
  const { id, label, description, placeholder, error, value, onChange, isLate, isNumber, isOfLines } = props
  const [draft, setDraft] = useState<string>()
  const end = () => {
    if (isLate && draft !== undefined && draft !== value) onChange(draft)
    setDraft(undefined)
  }
  const change = (text: string) => {
    setDraft(text)
    if (!isLate) onChange(text)
  }
  const same = { id, label, description, placeholder, error, autoComplete: 'off', value: draft ?? value, onBlur: end }
  return isOfLines ? (
    <Textarea {...same} autosize minRows={2} maxRows={12} onChange={(event) => change(event.currentTarget.value)} />
  ) : (
    <TextInput
      {...same}
      inputMode={isNumber ? 'decimal' : undefined}
      onChange={(event) => change(event.currentTarget.value)}
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
  /** Whether each text of a list has a line of its own, rather than all of them one line with commas. */
  isByLine?: boolean
  onChange: (value: unknown) => void
}) {
  const { field, label, schema, value, error, isByLine, onChange } = props
  const input = byLine(inputOf(schema), isByLine)
  const id = idOf(field)
  const help = schema.description?.replaceAll('\n', ' ')
  const usual = shown(schema.default)
  if (input === null || !canShow(input, value)) {
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
      isOfLines={input.kind === 'lines'}
      value={shown(value, input)}
      onChange={(text) => onChange(entered(input, text))}
    />
  )
}

function byLine(input: Input | null, isByLine = false): Input | null {
  return isByLine && input?.kind === 'list' ? { kind: 'lines' } : input
}

/** A value that the form does not show, such as a reference to another study. */
export function Elsewhere({ id, label, error }: { id: string; label: string; error?: string }) {
  return (
    <p id={id} tabIndex={-1} className="soft" style={{ margin: 0 }}>
      <strong>{label}</strong>: edited in the text{error && `. ${error}`}
    </p>
  )
}
