import type { ReactNode } from 'react'

/** Key figures: a term, its value, and a small note. */
export function Figures({ rows }: { rows: { term: string; value: ReactNode; note?: ReactNode }[] }) {
  return (
    <dl className="figures">
      {rows.map((row) => (
        <div key={row.term}>
          <dt>{row.term}</dt>
          <dd>
            {row.value}
            {row.note && <small>{row.note}</small>}
          </dd>
        </div>
      ))}
    </dl>
  )
}
