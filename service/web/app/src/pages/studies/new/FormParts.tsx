import { Button } from '@mantine/core'
import { type ReactNode, useId } from 'react'
import { Field, idOf } from './Field'
import { type Schema, type Schemas, property } from './schema'
import { type Path, changed, valueAt } from './yamlText'

/** What all parts of a form need: the document, its schema, its problems, and a way to change the text. */
export interface Form {
  schemas: Schemas
  /** The schema of the whole document. */
  root: Schema
  content: unknown
  errorOf: (field: string) => string | undefined
  change: (edit: (text: string) => string) => void
}

export type Part = { form: Form }

export const set = (form: Form, path: Path, value: unknown) => form.change((text) => changed(text, path, value))

export function schemaAt({ schemas }: Form, of: Schema, names: Path): Schema {
  return names.reduce<Schema>((schema, name) => property(schemas, schema, String(name)), of)
}

/**
 * One value; `of` is the schema of what has its key. A list is entered in a line, or each of its texts in one
 * (`isByLine`).
 */
export function Value({
  form,
  path,
  of,
  label,
  isByLine,
}: Part & { path: Path; of?: Schema; label?: string; isByLine?: boolean }) {
  const field = path.join('.')
  const schema = of === undefined ? schemaAt(form, form.root, path) : schemaAt(form, of, path.slice(-1))
  return (
    <Field
      field={field}
      label={label ?? String(path.at(-1))}
      schema={schema}
      value={valueAt(form.content, path)}
      error={form.errorOf(field)}
      isByLine={isByLine}
      onChange={(value) => set(form, path, value)}
    />
  )
}

export function Group({ title, help, children }: { title: string; help?: string; children: ReactNode }) {
  const id = useId()
  return (
    <fieldset aria-describedby={help && id}>
      <legend>{title}</legend>
      {help && (
        <p id={id} className="soft" style={{ margin: 0 }}>
          {help}
        </p>
      )}
      {children}
    </fieldset>
  )
}

export const entriesOf = (value: unknown): [string, unknown][] =>
  typeof value === 'object' && value !== null ? Object.entries(value) : []

/** A problem of a field that has several inputs. */
export function Problem({ form, field }: Part & { field: string }) {
  const error = form.errorOf(field)
  if (error === undefined) return null
  return (
    <p id={idOf(field)} tabIndex={-1} className="wrong">
      {error}
    </p>
  )
}

export function More({ title, children }: { title: string; children: ReactNode }) {
  return (
    <details>
      <summary>{title}</summary>
      <div className="form">{children}</div>
    </details>
  )
}

export function Add({ onClick, children }: { onClick: () => void; children: string }) {
  return (
    <Button variant="default" size="xs" onClick={onClick} style={{ justifySelf: 'start' }}>
      {children}
    </Button>
  )
}

export function Remove({ what, onClick }: { what: string; onClick: () => void }) {
  return (
    <Button
      variant="subtle"
      color="red"
      size="compact-xs"
      onClick={onClick}
      style={{ justifySelf: 'start' }}
      aria-label={`Remove ${what}`}
    >
      Remove
    </Button>
  )
}
