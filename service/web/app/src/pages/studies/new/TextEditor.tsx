import { type Ref, useEffect, useImperativeHandle, useMemo, useRef } from 'react'

export interface Editor {
  /** Moves the cursor to a place in the text, and selects it. */
  select: (range: [number, number]) => void
}

/** The text of a study file, with line numbers. */
export function TextEditor(props: {
  text: string
  onChange: (text: string) => void
  /** Lines, from 0, that have problems. */
  marked: ReadonlySet<number>
  editor: Ref<Editor>
}) {
  const { text, onChange, marked, editor } = props
  const area = useRef<HTMLTextAreaElement>(null)
  const numbers = useRef<HTMLDivElement>(null)
  const scroll = () => {
    if (numbers.current && area.current) numbers.current.scrollTop = area.current.scrollTop
  }
  useImperativeHandle(editor, () => ({
    select: ([start, stop]) => {
      const field = area.current!
      field.focus()
      field.setSelectionRange(start, stop)
      const line = text.slice(0, start).split('\n').length - 1
      field.scrollTop = Math.max(0, line - 4) * parseFloat(getComputedStyle(field).lineHeight)
    },
  }))
  useEffect(scroll, [text])
  const lines = useMemo(() => text.split('\n').map((_, k) => k), [text])
  return (
    <div className="editor">
      <div className="numbers" ref={numbers} aria-hidden="true">
        {lines.map((line) => (
          <div key={line} className={marked.has(line) ? 'marked' : ''}>
            {line + 1}
          </div>
        ))}
      </div>
      <textarea
        ref={area}
        aria-label="Study file"
        aria-describedby="problems"
        spellCheck={false}
        autoCapitalize="off"
        wrap="off"
        value={text}
        onChange={(event) => onChange(event.currentTarget.value)}
        onScroll={scroll}
      />
    </div>
  )
}
