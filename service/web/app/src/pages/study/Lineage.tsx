import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { finetuneOf } from '../../api/queries'
import type { Study, Summary } from '../../api/types'
import { count } from '../../format'

/** Which fine-tuning and which other studies this study continues; nothing for a study of its own. */
export function Lineage({ study, summary }: { study: Study; summary: Summary }) {
  const finetune = useQuery(finetuneOf(study.id))
  const { lineage, trained, search } = summary
  const rows = Object.entries(lineage)
  // Those of the fine-tuning that has created the study are named together.
  const others = Object.entries(trained).filter(([, { finetune: id }]) => id !== finetune.data?.id)
  const experts = finetune.isPending ? [] : others
  const { start, warm_start: warm } = search
  if (rows.length === 0 && experts.length === 0 && !start && !warm && !finetune.data) return null
  return (
    <section aria-labelledby="lineage">
      <h2 id="lineage">Lineage</h2>
      <ul>
        {finetune.data && (
          <li>
            The experts are those of the fine-tuning{' '}
            <Link to="/finetunes/$id" params={{ id: finetune.data.id }}>
              {finetune.data.name}
            </Link>
            .
          </li>
        )}
        {rows.map(([alias, source]) => (
          <li key={alias}>
            {alias} is{' '}
            <Link to="/studies/$id/trials/$number" params={{ id: source.study, number: `${source.trial}` }}>
              trial {source.trial} of {source.name}
            </Link>
            .
          </li>
        ))}
        {experts.map(([alias, source]) => (
          <li key={alias}>
            {alias} is the expert {source.expert} of the fine-tuning{' '}
            <Link to="/finetunes/$id" params={{ id: source.finetune }}>
              {source.name}
            </Link>
            .
          </li>
        ))}
        {start && (
          <li>
            The policies start as those of <OtherStudy id={start.study} name={start.name} />.
          </li>
        )}
        {warm && (
          <li>
            The searcher knew {count(warm.trials)} trials of <OtherStudy id={warm.study} name={warm.name} />.
          </li>
        )}
      </ul>
    </section>
  )
}

function OtherStudy({ id, name }: { id: string; name: string }) {
  return (
    <Link to="/studies/$id" params={{ id }}>
      {name}
    </Link>
  )
}
