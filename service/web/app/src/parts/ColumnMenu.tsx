import { useRef } from 'react'

/** A menu of the columns of a table, each shown or not; the first columns are always shown. */
export function ColumnMenu(props: {
  columns: readonly string[]
  shown: readonly string[]
  onChange: (shown: string[]) => void
}) {
  const { columns, shown, onChange } = props
  const menu = useRef<HTMLDetailsElement>(null)
  return (
    <details
      ref={menu}
      className="menu left"
      onKeyDown={(event) => {
        if (event.key !== 'Escape' || !menu.current?.open) return
        menu.current.open = false
        menu.current.querySelector('summary')?.focus()
      }}
      onBlur={(event) => {
        // A click on the menu's own text moves the focus nowhere.
        const next = event.relatedTarget
        if (next !== null && !event.currentTarget.contains(next)) event.currentTarget.open = false
      }}
    >
      <summary>Columns</summary>
      <div>
        <fieldset>
          <legend className="soft">Shown columns</legend>
          {columns.map((name) => (
            <label key={name}>
              <input
                type="checkbox"
                checked={shown.includes(name)}
                onChange={({ currentTarget }) =>
                  onChange(columns.filter((each) => (each === name ? currentTarget.checked : shown.includes(each))))
                }
              />{' '}
              {name}
            </label>
          ))}
        </fieldset>
      </div>
    </details>
  )
}
