import { useQuery } from '@tanstack/react-query'
import { api } from '../../api/client'
import { analysis as analysisQuery } from '../../api/queries'
import type { Finetune } from '../../api/types'
import { Answer, Nothing } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { finetuneRoute } from '../../router'
import { Landscapes } from './Landscapes'
import { Merges } from './Merges'
import { TaskVectors } from './TaskVectors'

/** Task vectors, joint losses and merges of the experts, also beside those of another fine-tuning. */
export function AnalysisOfExperts({ finetune }: { finetune: Finetune }) {
  const { against } = finetuneRoute.useSearch()
  const isThere = finetune.links.analysis !== undefined
  const query = useQuery({ ...analysisQuery(finetune.id, against), enabled: isThere })
  if (!isThere)
    return (
      <section aria-labelledby="analysis">
        <h2 id="analysis">Analysis</h2>
        <Nothing>
          The experts are not analysed: they are once all of them are trained, if the specification has the key
          &ldquo;analysis&rdquo;.
        </Nothing>
      </section>
    )
  return (
    <>
      <h2>Analysis</h2>
      <Against finetune={finetune} />
      <Answer of={query}>
        {(found) => (
          <>
            <Merges analysis={found} />
            <Landscapes analysis={found} />
            <TaskVectors analysis={found} />
          </>
        )}
      </Answer>
    </>
  )
}

/** The choice of another fine-tuning, whose analysis is shown besides. */
function Against({ finetune }: { finetune: Finetune }) {
  const { against } = finetuneRoute.useSearch()
  const navigate = finetuneRoute.useNavigate()
  const others = useQuery({
    queryKey: ['finetunes', 'analysed'],
    queryFn: async ({ signal }) => {
      const query = { state: 'COMPLETE', sort: '-created', limit: 200 } as const
      return (await api.GET('/v1/finetunes', { params: { query }, signal })).data!.finetunes
    },
  })
  const options = (others.data ?? [])
    .filter(({ id, links }) => id !== finetune.id && (links.analysis !== undefined || id === against))
    .map(({ id, name }) => ({ value: id, label: `${name} (${id.slice(0, 8)})` }))
  if (options.length === 0 && against === undefined) return null
  return (
    <div className="row">
      <Choose
        label="Compare with another fine-tuning"
        any="compare with no other fine-tuning"
        options={options}
        value={against}
        onChange={(chosen) => navigate({ search: { against: chosen }, replace: true })}
      />
    </div>
  )
}
