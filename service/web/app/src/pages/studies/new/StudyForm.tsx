import { NativeSelect } from '@mantine/core'
import { Draft, Elsewhere, idOf } from './Field'
import { Add, Group, More, type Part, Problem, Remove, Value, entriesOf, schemaAt, set } from './FormParts'
import { ModelField } from './ModelField'
import { TaskOf } from './TaskForm'
import { inputOf, kindsOf, property, resolved } from './schema'
import { type Path, changed, renamed, valueAt } from './yamlText'

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
        {Object.keys(resolved(form.schemas, property(form.schemas, form.root, 'fidelity')).properties ?? {}).map(
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

function Base({ form }: Part) {
  const path = ['models', 'base']
  const value = valueAt(form.content, path)
  return (
    <ModelField
      id={idOf('models.base')}
      label="base"
      description={schemaAt(form, form.root, path).description}
      isBase
      value={typeof value === 'string' ? value : ''}
      error={form.errorOf('models.base')}
      onChange={(text) => set(form, path, text)}
    />
  )
}

function Experts({ form }: Part) {
  const path = ['models', 'experts']
  const help = schemaAt(form, form.root, path).description
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
  const section = schemaAt(form, form.root, ['search_space'])
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
  const schema = schemaAt(form, form.root, [section])
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
