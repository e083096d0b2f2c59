import { useQuery } from '@tanstack/react-query'
import { trialPlot } from '../../api/queries'
import type { ShownTrial, Study } from '../../api/types'
import { Answer } from '../../parts/Answer'
import { Coefficients } from './Coefficients'
import { Configuration } from './Configuration'
import { LayerPath } from './LayerPath'
import { RecipePicture } from './RecipePicture'

/** How the trial's models are merged: recipe by runs of layers, layer path, coefficients, and the configuration. */
export function Merge({ study, trial }: { study: Study; trial: ShownTrial }) {
  const recipe = useQuery(trialPlot(study.id, trial.number, 'recipe'))
  const coefficients = useQuery(trialPlot(study.id, trial.number, 'coefficients'))
  const path = useQuery(trialPlot(study.id, trial.number, 'path'))
  return (
    <>
      <section aria-labelledby="recipe">
        <h2 id="recipe">Recipe</h2>
        <Answer of={recipe}>
          {(drawn) => (
            <Answer of={coefficients}>{({ experts }) => <RecipePicture plot={drawn} experts={experts} />}</Answer>
          )}
        </Answer>
        <Configuration trial={trial} />
      </section>
      <Answer of={path}>{(found) => (found.is_plain ? null : <LayerPath plot={found} />)}</Answer>
      <section aria-labelledby="coefficients">
        <h2 id="coefficients">Coefficients</h2>
        <Answer of={coefficients}>{(found) => <Coefficients plot={found} />}</Answer>
      </section>
    </>
  )
}
