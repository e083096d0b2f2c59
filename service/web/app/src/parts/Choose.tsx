import { NativeSelect, SegmentedControl } from '@mantine/core'

/** A choice of one of few words, or of any of them. */
export function Choose(props: {
  label: string
  options: readonly (string | { value: string; label: string })[]
  value: string | undefined
  /** The words for "no choice"; without them one is always chosen. */
  any?: string
  /** With a description, the label is shown above the field. */
  description?: string
  onChange: (chosen: string | undefined) => void
}) {
  const { label, options, value, any, description, onChange } = props
  const data = options.map((each) => (typeof each === 'string' ? { value: each, label: each } : each))
  return (
    <NativeSelect
      label={description === undefined ? undefined : label}
      aria-label={description === undefined ? label : undefined}
      description={description}
      data={any === undefined ? data : [{ value: '', label: any }, ...data]}
      value={value ?? ''}
      onChange={(event) => onChange(event.currentTarget.value || undefined)}
    />
  )
}

// Buttons in one line fit into a narrow window only if they are few and their names are short.
const MAX_BUTTONS = 5
const MAX_LETTERS = 30

/** A choice of one objective, as buttons where there are few; nothing for a single one. */
export function ChooseObjective(props: { names: readonly string[]; value: string; onChange: (name: string) => void }) {
  const { names, value, onChange } = props
  if (names.length < 2) return null
  if (names.length <= MAX_BUTTONS && names.join('').length <= MAX_LETTERS)
    return <SegmentedControl aria-label="Objective" size="xs" data={[...names]} value={value} onChange={onChange} />
  return (
    <div className="row">
      <Choose label="Objective" options={names} value={value} onChange={(name) => name && onChange(name)} />
    </div>
  )
}
