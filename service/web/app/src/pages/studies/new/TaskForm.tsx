import { NativeSelect } from '@mantine/core'
import { Draft, Elsewhere, idOf } from './Field'
import { type Form, More, type Part, Problem, Value, entriesOf, set } from './FormParts'
import { type Schema, property } from './schema'
import { type Path, valueAt } from './yamlText'

// The beginning of `images` that names a data set of the hub.
const HUB = 'hub:'

type Kind = 'name' | 'file' | 'images' | 'suite'

/** Names of the image tasks that study files may name, which the schema has as examples. */
const suitesOf = (spec: Schema): string[] =>
  (spec.properties?.task?.examples ?? []).filter((each) => typeof each === 'string')

function kindOf(task: unknown, suites: string[]): Kind | undefined {
  if (typeof task !== 'object' || task === null) {
    return typeof task === 'string' && suites.includes(task) ? 'suite' : 'name'
  }
  if ('file' in task) return 'file'
  return 'images' in task ? 'images' : undefined
}

/** A task of lm-eval or of images by its name, a file with samples, or images with labels. */
export function TaskOf({ form, path }: Part & { path: Path }) {
  const task = valueAt(form.content, path)
  const suites = suitesOf(form.schemas.ObjectiveSpec ?? {})
  const kind = kindOf(task, suites)
  const field = path.join('.')
  if (kind === undefined) return <Elsewhere id={idOf(field)} label="task" error={form.errorOf(field)} />
  const choose = (chosen: string) =>
    set(form, path, { name: '', suite: suites[0], file: { file: '' }, images: { images: '', head: '' } }[chosen])
  return (
    <>
      <NativeSelect
        label="source of the task"
        data={[
          { value: 'name', label: 'text, lm-eval: a task or a YAML file' },
          { value: 'file', label: 'text, samples in a JSONL file' },
          { value: 'images', label: 'images: a folder, a JSONL file or a data set of the hub' },
          ...(suites.length > 0 ? [{ value: 'suite', label: 'images, a task of the papers (CLIP)' }] : []),
        ]}
        value={kind}
        onChange={(event) => choose(event.currentTarget.value)}
      />
      {kind === 'file' && <TextFile form={form} path={path} />}
      {kind === 'images' && <Images form={form} path={path} />}
      {kind === 'suite' && (
        <NativeSelect
          id={idOf(field)}
          label="task"
          error={form.errorOf(field)}
          data={suites}
          value={String(task)}
          onChange={(event) => set(form, path, event.currentTarget.value)}
        />
      )}
      {kind === 'name' && (
        <Draft
          id={idOf(field)}
          label="task"
          value={typeof task === 'string' ? task : ''}
          error={form.errorOf(field)}
          isLate // another field takes its place where the name is that of a task of images
          onChange={(text) => set(form, path, text)}
        />
      )}
    </>
  )
}

function TextFile({ form, path }: Part & { path: Path }) {
  const schema = form.schemas.InlineTask ?? {}
  return (
    <>
      <Problem form={form} field={path.join('.')} />
      <Value form={form} path={[...path, 'file']} of={schema} />
      <Value form={form} path={[...path, 'max_tokens']} of={schema} />
    </>
  )
}

/** Images with labels: where they are, the split of a data set, and whose head scores them. */
function Images({ form, path }: Part & { path: Path }) {
  const schema = form.schemas.ImageTask ?? {}
  const place = valueAt(form.content, [...path, 'images'])
  const isOnHub = typeof place === 'string' && place.startsWith(HUB)
  // Of files there are no splits; a key that is there nevertheless is shown, so that it can be taken away.
  const isShown = (key: string) => isOnHub || valueAt(form.content, [...path, key]) !== undefined
  return (
    <>
      <Problem form={form} field={path.join('.')} />
      <Value form={form} path={[...path, 'images']} of={schema} />
      {['split', 'config'].filter(isShown).map((key) => (
        <Value key={key} form={form} path={[...path, key]} of={schema} />
      ))}
      <Head form={form} path={[...path, 'head']} schema={schema} />
      <More title="Classes, templates and keys">
        {['classes', 'templates', 'image', 'label'].map((key) => (
          <Value key={key} form={form} path={[...path, key]} of={schema} isByLine={key === 'templates'} />
        ))}
      </More>
    </>
  )
}

/** The model whose head scores a task: the base or one of the experts. Heads are not merged. */
function Head({ form, path, schema }: Part & { path: Path; schema: Schema }) {
  const field = path.join('.')
  const given = valueAt(form.content, path)
  const value = typeof given === 'string' ? given : ''
  const models = modelsOf(form)
  const unknown = value !== '' && !models.includes(value) ? [value] : []
  return (
    <NativeSelect
      id={idOf(field)}
      label="head"
      description={property(form.schemas, schema, 'head').description}
      error={form.errorOf(field)}
      data={[{ value: '', label: 'choose a model' }, ...unknown, ...models]}
      value={value}
      onChange={(event) => set(form, path, event.currentTarget.value)}
    />
  )
}

/** Aliases of the models of a study, or of the experts that a fine-tuning trains. */
function modelsOf({ content }: Form): string[] {
  const experts = valueAt(content, ['models', 'experts']) ?? valueAt(content, ['experts'])
  return ['base', ...entriesOf(experts).map(([alias]) => alias)]
}
