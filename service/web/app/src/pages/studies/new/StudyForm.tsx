import { Button, NativeSelect } from '@mantine/core'
import { type ReactNode, useId } from 'react'
import { Draft, Elsewhere, Field, idOf } from './Field'
import { ModelField } from './ModelField'
import { type Schema, type Schemas, inputOf, kindsOf, property, resolved } from './schema'
import { type Path, changed, renamed, valueAt } from './yamlText'

/** What all parts of the form need: the file, its schema, its problems, and a way to change the text. */
export interface Form {
  schemas: Schemas
  content: unknown
  errorOf: (field: string) => string | undefined
  change: (edit: (text: string) => string) => void
}

type Part = { form: Form }

/** The options of a study file as a form, made from its JSON Schema. */
export function StudyForm({ form }: Part) {
  return (
    <div className="form">
      <Value form={form} path={['name']} />
      <Base form={form} />
      <Experts form={form} />
      <Space form={form} />
      <Group title="Search">
        <Value form={form} path={['search', 'algorithm']} />
        <Value form={form} path={['search', 'max_trials']} />
        <Value form={form} path={['search', 'seed']} />
      </Group>
      <Group title="Fidelity">
        {Object.keys(resolved(form.schemas, property(form.schemas, studyOf(form), 'fidelity')).properties ?? {}).map(
          (name) => (
            <Value key={name} form={form} path={['fidelity', name]} />
          ),
        )}
      </Group>
      <Tasks form={form} section="objectives" title="Objectives" />
      <Tasks form={form} section="holdout" title="Held-out data" />
    </div>
  )
}

const studyOf = (form: Form): Schema => form.schemas.Study ?? {}

const set = (form: Form, path: Path, value: unknown) => form.change((text) => changed(text, path, value))

function schemaAt({ schemas }: Form, of: Schema, names: Path): Schema {
  return names.reduce<Schema>((schema, name) => property(schemas, schema, String(name)), of)
}

/** One value; `of` is the schema of what `path` begins with, and `names` the keys in it. */
function Value({ form, path, of, label }: Part & { path: Path; of?: Schema; label?: string }) {
  const field = path.join('.')
  const schema = of === undefined ? schemaAt(form, studyOf(form), path) : schemaAt(form, of, path.slice(-1))
  return (
    <Field
      field={field}
      label={label ?? String(path.at(-1))}
      schema={schema}
      value={valueAt(form.content, path)}
      error={form.errorOf(field)}
      onChange={(value) => set(form, path, value)}
    />
  )
}

function Group({ title, help, children }: { title: string; help?: string; children: ReactNode }) {
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

const entriesOf = (value: unknown): [string, unknown][] =>
  typeof value === 'object' && value !== null ? Object.entries(value) : []

function Base({ form }: Part) {
  const path = ['models', 'base']
  const value = valueAt(form.content, path)
  return (
    <ModelField
      id={idOf('models.base')}
      label="base"
      description={schemaAt(form, studyOf(form), path).description}
      isBase
      value={typeof value === 'string' ? value : ''}
      error={form.errorOf('models.base')}
      onChange={(text) => set(form, path, text)}
    />
  )
}

function Experts({ form }: Part) {
  const path = ['models', 'experts']
  const help = schemaAt(form, studyOf(form), path).description
  const found = entriesOf(valueAt(form.content, path))
  const names = new Set(found.map(([alias]) => alias))
  const add = () => {
    let k = names.size + 1
    while (names.has(`expert${k}`)) k += 1
    set(form, [...path, `expert${k}`], '')
  }
  return (
    <Group title="Experts" help={help}>
      <Problem form={form} field="models.experts" />
      {found.map(([alias, model], k) => {
        const field = `models.experts.${alias}`
        return (
          <div key={k} className="entry">
            <Draft
              id={`alias-${k}`}
              label="alias"
              value={alias}
              isLate
              onChange={(to) => to !== '' && !names.has(to) && form.change((text) => renamed(text, path, alias, to))}
            />
            {typeof model === 'object' && model !== null ? (
              <Elsewhere id={idOf(field)} label={fromOf(model)} error={form.errorOf(field)} />
            ) : (
              <ModelField
                id={idOf(field)}
                label="model"
                value={typeof model === 'string' ? model : ''}
                error={form.errorOf(field)}
                onChange={(text) => set(form, [...path, alias], text)}
              />
            )}
            <Remove what={`expert ${alias}`} onClick={() => set(form, [...path, alias], undefined)} />
          </div>
        )
      })}
      <Add onClick={add}>Add an expert</Add>
    </Group>
  )
}

/** What an expert that another job has made is called. */
function fromOf(model: object): string {
  if ('from_finetune' in model) return 'expert of a fine-tuning'
  return 'from_study' in model ? 'merge of another study' : 'model'
}

function Space({ form }: Part) {
  const section = schemaAt(form, studyOf(form), ['search_space'])
  const kinds = kindsOf(form.schemas, section)
  const usual = (section.default as { kind?: string } | undefined)?.kind
  const given = valueAt(form.content, ['search_space', 'kind'])
  const kind = typeof given === 'string' ? given : undefined
  const schema = kinds.get(kind ?? usual ?? '')
  const field = 'search_space.kind'
  // Options of another kind are refused, so that a new kind begins with its defaults.
  const choose = (chosen: string) => set(form, ['search_space'], chosen === '' ? undefined : { kind: chosen })
  const unknown = kind !== undefined && !kinds.has(kind) ? [kind] : []
  return (
    <Group title="Search space">
      <NativeSelect
        id={idOf(field)}
        label="kind"
        description={schema && property(form.schemas, schema, 'kind').description}
        error={form.errorOf(field) ?? form.errorOf('search_space')}
        data={[{ value: '', label: `default: ${usual ?? ''}` }, ...unknown, ...kinds.keys()]}
        value={kind ?? ''}
        onChange={(event) => choose(event.currentTarget.value)}
      />
      {schema && kind !== undefined && (
        <More title={`Options of ${kind}`}>
          {Object.keys(schema.properties ?? {})
            .filter((name) => name !== 'kind')
            .map((name) => (
              <Value key={name} form={form} path={['search_space', name]} of={schema} />
            ))}
        </More>
      )}
    </Group>
  )
}

const OWN = ['name', 'task', 'metric']

function Tasks({ form, section, title }: Part & { section: 'objectives' | 'holdout'; title: string }) {
  const schema = schemaAt(form, studyOf(form), [section])
  const found = valueAt(form.content, [section])
  const list: unknown[] = Array.isArray(found) ? found : []
  const add = () => set(form, [section, list.length], { name: '', task: '', metric: '' })
  const first = (text: string) => changed(text, [section], [{ name: '', task: '', metric: '' }])
  return (
    <Group title={title} help={schema.description?.trim()}>
      <Problem form={form} field={section} />
      {list.map((_, k) => (
        <Task key={k} form={form} path={[section, k]} noun={section === 'objectives' ? 'objective' : 'held-out data'} />
      ))}
      <Add onClick={list.length === 0 ? () => form.change(first) : add}>
        {section === 'objectives' ? 'Add an objective' : 'Add held-out data'}
      </Add>
    </Group>
  )
}

function Task({ form, path, noun }: Part & { path: Path; noun: string }) {
  const content = valueAt(form.content, path)
  const field = path.join('.')
  const spec = form.schemas.ObjectiveSpec ?? {}
  const name = valueAt(content, ['name'])
  const legend = `${noun} ${typeof name === 'string' && name !== '' ? name : Number(path.at(-1)) + 1}`
  const remove = <Remove what={legend} onClick={() => set(form, path, undefined)} />
  const isTask = valueAt(content, ['task']) !== undefined || entriesOf(content).length === 0
  if (!isTask && entriesOf(content).some(([key]) => !OWN.includes(key))) {
    return (
      <Group title={legend}>
        <Elsewhere id={idOf(field)} label={legend} error={form.errorOf(field)} />
        {remove}
      </Group>
    )
  }
  return (
    <Group title={legend}>
      <Problem form={form} field={field} />
      <Value form={form} path={[...path, 'name']} of={spec} />
      <TaskOf form={form} path={[...path, 'task']} />
      <Value form={form} path={[...path, 'metric']} of={spec} />
      <More title="More options">
        {Object.entries(spec.properties ?? {})
          .filter(([key, schema]) => !OWN.includes(key) && inputOf(resolved(form.schemas, schema)) !== null)
          .map(([key]) => (
            <Value key={key} form={form} path={[...path, key]} of={spec} />
          ))}
      </More>
      {remove}
    </Group>
  )
}

/** A task of lm-eval, by its name, or a file with samples; others, such as tasks of images, are edited in the text. */
function TaskOf({ form, path }: Part & { path: Path }) {
  const task = valueAt(form.content, path)
  const isSection = typeof task === 'object' && task !== null
  const isFile = isSection && 'file' in task
  const inline = form.schemas.InlineTask ?? {}
  const field = path.join('.')
  const choose = (kind: string) => set(form, path, kind === 'file' ? { file: '' } : '')
  if (isSection && !isFile) return <Elsewhere id={idOf(field)} label="task" error={form.errorOf(field)} />
  return (
    <>
      <NativeSelect
        label="source of the task"
        data={[
          { value: 'name', label: 'lm-eval: a task or a YAML file' },
          { value: 'file', label: 'samples in a JSONL file' },
        ]}
        value={isFile ? 'file' : 'name'}
        onChange={(event) => choose(event.currentTarget.value)}
      />
      {isFile ? (
        <>
          <Problem form={form} field={field} />
          <Value form={form} path={[...path, 'file']} of={inline} />
          <Value form={form} path={[...path, 'max_tokens']} of={inline} />
        </>
      ) : (
        <Draft
          id={idOf(field)}
          label="task"
          value={typeof task === 'string' ? task : ''}
          error={form.errorOf(field)}
          onChange={(text) => set(form, path, text)}
        />
      )}
    </>
  )
}

/** A problem of a field that has several inputs. */
function Problem({ form, field }: Part & { field: string }) {
  const error = form.errorOf(field)
  if (error === undefined) return null
  return (
    <p id={idOf(field)} tabIndex={-1} className="wrong">
      {error}
    </p>
  )
}

function More({ title, children }: { title: string; children: ReactNode }) {
  return (
    <details>
      <summary>{title}</summary>
      <div className="form">{children}</div>
    </details>
  )
}

function Add({ onClick, children }: { onClick: () => void; children: string }) {
  return (
    <Button variant="default" size="xs" onClick={onClick} style={{ justifySelf: 'start' }}>
      {children}
    </Button>
  )
}

function Remove({ what, onClick }: { what: string; onClick: () => void }) {
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
