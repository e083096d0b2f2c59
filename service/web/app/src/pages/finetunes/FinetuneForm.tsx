import { NativeSelect } from '@mantine/core'
import { useState } from 'react'
import { Draft, idOf } from '../studies/new/Field'
import {
  Add,
  type Form,
  Group,
  More,
  type Part,
  Problem,
  Remove,
  Value,
  entriesOf,
  set,
} from '../studies/new/FormParts'
import { ModelField } from '../studies/new/ModelField'
import { type Schema, property } from '../studies/new/schema'
import { type Path, moved, renamed, valueAt } from '../studies/new/yamlText'
import { type Kind, inherited, kindOf, withoutInherited } from './fleet'

const CHOICES = [
  { value: 'file', label: 'text, a JSONL file' },
  { value: 'dataset', label: 'text, a data set of the hub or a directory' },
  { value: 'images', label: 'images with labels, a folder or a JSONL file' },
] as const satisfies { value: Kind; label: string }[]

/** The options of each kind; those of another kind are taken out of the text when the kind changes. */
const OPTIONS: Record<Kind, { usual: string[]; more: string[] }> = {
  file: { usual: ['file'], more: ['prompt', 'completion', 'max_length', 'packing', 'pad_token'] },
  dataset: {
    usual: ['dataset', 'configuration', 'split'],
    more: ['prompt', 'completion', 'max_length', 'packing', 'pad_token'],
  },
  images: { usual: ['images'], more: ['classes', 'templates', 'image', 'label'] },
}

/** The options of a fine-tuning as a form: one expert, or several that differ in their data. */
export function FinetuneForm({ form }: Part) {
  const isFleet = valueAt(form.content, ['experts']) !== undefined
  return (
    <div className="form">
      <Value form={form} path={['name']} />
      <ModelField
        id={idOf('base')}
        label="base"
        description={property(form.schemas, form.root, 'base').description}
        isBase
        value={textAt(form.content, ['base'])}
        error={form.errorOf('base')}
        onChange={(text) => set(form, ['base'], text)}
      />
      {isFleet ? (
        <Experts form={form} />
      ) : (
        <>
          <Group title="Data">
            <DataOf form={form} path={['data']} />
          </Group>
          <Add onClick={() => begin(form)}>Several experts</Add>
        </>
      )}
      <Group title={isFleet ? 'Training of all experts' : 'Training'}>
        <Method form={form} />
        {['steps', 'epochs', 'batch', 'micro_batch', 'learning_rate'].map((key) => (
          <Value key={key} form={form} path={['training', key]} of={form.schemas.Training} />
        ))}
      </Group>
      <p className="soft" style={{ margin: 0 }}>
        Evaluation, adapter, analysis and a study that merges the experts are edited in the text.
      </p>
    </div>
  )
}

/** Makes a single expert the first of several, with the data that it had. */
function begin(form: Form) {
  const path = ['experts', 'expert1', 'data']
  if (entriesOf(valueAt(form.content, ['data'])).length === 0) set(form, path, { file: '' })
  else form.change((text) => moved(text, ['data'], path))
}

const textAt = (content: unknown, path: Path): string => {
  const value = valueAt(content, path)
  return typeof value === 'string' ? value : ''
}

function Method({ form }: Part) {
  return <Value form={form} path={['method', 'kind']} of={form.schemas.Method} label="method" />
}

function Experts({ form }: Part) {
  const found = entriesOf(valueAt(form.content, ['experts']))
  const names = new Set(found.map(([alias]) => alias))
  const add = () => {
    let k = names.size + 1
    while (names.has(`expert${k}`)) k += 1
    const last = found.at(-1)?.[0]
    const kind = last === undefined ? 'file' : kindOf(form.content, ['experts', last, 'data'])
    set(form, ['experts', `expert${k}`], { data: { [kind]: '' } })
  }
  return (
    <Group title="Experts">
      <Problem form={form} field="experts" />
      {found.map(([alias], k) => {
        const path = ['experts', alias]
        return (
          <Group key={k} title={`expert ${alias}`}>
            <Problem form={form} field={path.join('.')} />
            <Draft
              id={`alias-${k}`}
              label="alias"
              value={alias}
              isLate
              onChange={(to) =>
                to !== '' && !names.has(to) && form.change((text) => renamed(text, ['experts'], alias, to))
              }
            />
            <DataOf form={form} path={[...path, 'data']} />
            <More title="Length of its training">
              {['steps', 'epochs'].map((key) => (
                <Value key={key} form={form} path={[...path, 'training', key]} of={form.schemas.Training} />
              ))}
            </More>
            <Remove what={`expert ${alias}`} onClick={() => set(form, path, undefined)} />
          </Group>
        )
      })}
      <Add onClick={add}>Add an expert</Add>
    </Group>
  )
}

/** The schema of data with what an expert inherits as defaults. */
function withDefaults(schema: Schema, shared: unknown): Schema {
  const known = entriesOf(shared).filter(([key]) => schema.properties?.[key] !== undefined)
  const own = known.map(([key, value]) => [key, { ...schema.properties![key], default: value }] as const)
  return { ...schema, properties: { ...schema.properties, ...Object.fromEntries(own) } }
}

/** Training data: where they are, and of images whose head is trained or stays as it is. */
function DataOf({ form, path }: Part & { path: Path }) {
  const schema = withDefaults(form.schemas.Data ?? {}, inherited(form.content, path))
  const kind = kindOf(form.content, path)
  const { usual, more } = OPTIONS[kind]
  const choose = (chosen: Kind) => {
    const foreign = new Set([...OPTIONS[kind].usual, ...OPTIONS[kind].more, 'head'])
    for (const key of OPTIONS[chosen].more) foreign.delete(key)
    const kept = entriesOf(valueAt(form.content, path)).filter(([key, value]) => value !== null && !foreign.has(key))
    set(form, path, { ...Object.fromEntries(kept), ...withoutInherited(form.content, path, chosen), [chosen]: '' })
  }
  return (
    <>
      <Problem form={form} field={path.join('.')} />
      <NativeSelect
        label="kind of data"
        data={CHOICES}
        value={kind}
        onChange={(event) => choose(event.currentTarget.value as Kind)}
      />
      {usual.map((key) => (
        <Value key={key} form={form} path={[...path, key]} of={schema} />
      ))}
      {kind === 'images' && <Head form={form} path={[...path, 'head']} />}
      <More title="More options of the data">
        {more.map((key) => (
          <Value key={key} form={form} path={[...path, key]} of={schema} />
        ))}
      </More>
    </>
  )
}

/** Whose head maps features to classes: the base's or another model's, which stays as it is, or a new one. */
function Head({ form, path }: Part & { path: Path }) {
  const field = path.join('.')
  const shared = valueAt(inherited(form.content, path.slice(0, -1)), ['head'])
  const value = valueAt(form.content, path) ?? shared
  const given = typeof value === 'string' ? value : ''
  // A name that begins with base or new stays one while it is written.
  const [isWritten, setWritten] = useState(false)
  const isOwn = isWritten || ((value ?? null) !== null && given !== 'base' && given !== 'new')
  return (
    <>
      <NativeSelect
        label="kind of head"
        description={property(form.schemas, form.schemas.Data ?? {}, 'head').description}
        data={[
          { value: 'base', label: "frozen: the base's head" },
          { value: 'other', label: "frozen: another model's head" },
          { value: 'new', label: 'new: begins at 0 and is trained' },
        ]}
        value={isOwn ? 'other' : given === 'new' ? 'new' : 'base'}
        error={isOwn ? undefined : form.errorOf(field)}
        onChange={(event) => {
          const chosen = event.currentTarget.value
          set(form, path, { base: shared === undefined ? undefined : 'base', new: 'new', other: '' }[chosen])
        }}
      />
      {isOwn && (
        <ModelField
          id={idOf(field)}
          label="model with the head"
          isBase
          value={given}
          error={form.errorOf(field)}
          onFocus={() => setWritten(true)}
          onBlur={() => setWritten(false)}
          onChange={(text) => set(form, path, text)}
        />
      )}
    </>
  )
}
