/** Changes of one value in the text of a YAML document; comments, order and the style of all else stay. */
import { type Document, type Pair, Scalar, isCollection, isMap, isNode, isScalar, parseDocument, stringify } from 'yaml'

export type Path = readonly (string | number)[]

export interface Parsed {
  document: Document.Parsed
  /** The text's content; undefined if the text is no YAML mapping. */
  content: Record<string, unknown> | undefined
  /** What is wrong with the text as YAML, and where. */
  error: { message: string; range: [number, number] } | undefined
}

export function parsed(text: string): Parsed {
  const document = parseDocument(text)
  const [found] = document.errors
  if (found) return { document, content: undefined, error: { message: found.message, range: [...found.pos] } }
  if (document.contents !== null && !isMap(document.contents)) {
    return { document, content: undefined, error: { message: 'The text is no mapping.', range: [0, text.length] } }
  }
  try {
    return { document, content: document.toJS() ?? {}, error: undefined }
  } catch (error) {
    // An alias without an anchor is not among the document's errors.
    return { document, content: undefined, error: { message: String(error), range: [0, text.length] } }
  }
}

/** The value at `path` in parsed content. */
export function valueAt(content: unknown, path: Path): unknown {
  return path.reduce<unknown>(
    (at, key) => (typeof at === 'object' && at !== null ? (at as Record<string | number, unknown>)[key] : undefined),
    content,
  )
}

/** The text with another value at `path`; without one, the key is left out. */
export function changed(text: string, path: Path, value: unknown): string {
  const { document } = parsed(text)
  const before = document.getIn(path, true)
  if (value === undefined) {
    document.deleteIn(path)
    dropEmpty(document, path.slice(0, -1))
  } else if (isScalar(before) && (typeof value !== 'object' || value === null)) {
    before.value = value // the scalar keeps its comment
    if (typeof value !== 'string') before.type = undefined
  } else {
    const node = document.createNode(value)
    if (isCollection(before) && isCollection(node)) node.flow = before.flow
    else if (isCollection(node) && Array.isArray(value)) node.flow = value.every((each) => typeof each !== 'object')
    prepare(document, path.slice(0, -1))
    document.setIn(path, node)
  }
  return written(document, text)
}

/** The text with the value at `from` at another path; comments in the value stay. */
export function moved(text: string, from: Path, to: Path): string {
  const { document } = parsed(text)
  const node = document.getIn(from, true)
  if (node === undefined) return text
  document.deleteIn(from)
  prepare(document, to.slice(0, -1))
  document.setIn(to, node)
  return written(document, text)
}

/** The text with another key for an entry of the mapping at `path`. */
export function renamed(text: string, path: Path, from: string, to: string): string {
  const { document } = parsed(text)
  const map = document.getIn(path)
  if (!isMap(map)) return text
  const pair = map.items.find((each) => isScalar(each.key) && String(each.key.value) === from) as Pair | undefined
  if (pair && isScalar(pair.key)) pair.key.value = to
  return written(document, text)
}

/** Where the value at `path`, or else what contains it, is in the text. */
export function rangeOf(text: string, path: Path): [number, number] {
  const { document, error } = parsed(text)
  if (error) return error.range
  for (let length = path.length; length > 0; length -= 1) {
    const node = document.getIn(path.slice(0, length), true)
    if (isNode(node) && node.range) return [node.range[0], node.range[1]]
  }
  return [0, 0]
}

/** A document as YAML: short lists of plain values in one line. */
export function asYaml(content: unknown): string {
  const document = parseDocument(stringify(content, { lineWidth: 0, aliasDuplicateObjects: false }))
  flowLists(document.contents)
  return document.toString({ lineWidth: 0, flowCollectionPadding: false })
}

/** Whether a text is JSON; YAML may begin with a brace too. */
export function isJson(text: string): boolean {
  try {
    JSON.parse(text)
    return true
  } catch {
    return false
  }
}

/** A field of a server's message, such as objectives.0.name, as a path. */
export const pathOf = (field: string): Path =>
  field === '' ? [] : field.split('.').map((part) => (/^\d+$/.test(part) ? Number(part) : part))

/** Gives missing and empty (null) parents a mapping. */
function prepare(document: Document, path: Path) {
  path.forEach((_, k) => {
    const at = path.slice(0, k + 1)
    if (!isCollection(document.getIn(at))) document.setIn(at, document.createNode({}))
  })
}

/** Removes what contains nothing any more; `path` is that of a collection from which a key was taken. */
function dropEmpty(document: Document, path: Path) {
  if (path.length === 0) return
  const found = document.getIn(path)
  if (!isCollection(found) || found.items.length > 0) return
  document.deleteIn(path)
  dropEmpty(document, path.slice(0, -1))
}

function written(document: Document, before: string): string {
  return document.toString({ lineWidth: 0, flowCollectionPadding: /\{ /.test(before) })
}

function flowLists(node: unknown) {
  if (!isCollection(node)) return
  const values = node.items.map((item) => (isScalar(item) || isCollection(item) ? item : (item as Pair).value))
  if (!isMap(node) && values.length > 0 && values.every((value) => value instanceof Scalar)) node.flow = true
  values.forEach(flowLists)
}
