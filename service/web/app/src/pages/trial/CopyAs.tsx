import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useState } from 'react'
import { BASE } from '../../api/client'
import { mergekit, recipe as recipeQuery, session, studyFile } from '../../api/queries'
import type { ShownTrial, Study } from '../../api/types'
import { Answer } from '../../parts/Answer'
import { Choose } from '../../parts/Choose'
import { CopyField } from '../../parts/CopyField'
import { type Models, continuingStudy, curlCommand, elsewhere, mergeCommand } from './copies'

const FORMS = {
  mergekit: 'mergekit configuration (YAML)',
  merge: 'mergesearch merge',
  curl: 'curl',
  study: 'study file that continues from this merge',
} as const

type Form = keyof typeof FORMS

interface Of {
  study: Study
  trial: ShownTrial
}

/** The trial's merge as a text to use elsewhere: a mergekit configuration, commands, or a study file. */
export function CopyAs({ study, trial }: Of) {
  const [form, setForm] = useState<Form>()
  const options = Object.entries(FORMS).map(([value, label]) => ({ value, label }))
  return (
    <section aria-labelledby="copy">
      <h2 id="copy">Copy as</h2>
      <div style={{ maxWidth: 420, marginBottom: 10 }}>
        <Choose
          label="Copy as"
          any="choose a form"
          options={options}
          value={form}
          onChange={(chosen) => setForm(chosen as Form | undefined)}
        />
      </div>
      {form === 'mergekit' && <Mergekit study={study} trial={trial} />}
      {form === 'merge' && <MergeCommand study={study} trial={trial} />}
      {form === 'curl' && <Curl study={study} trial={trial} />}
      {form === 'study' && <Continuing study={study} trial={trial} />}
    </section>
  )
}

function Mergekit({ study, trial }: Of) {
  const query = useQuery(mergekit(study.id, trial.number))
  return <Answer of={query}>{(text) => <CopyField label={FORMS.mergekit} text={text} />}</Answer>
}

const SERVER = location.origin + BASE

function MergeCommand({ study, trial }: Of) {
  const recipe = useQuery(recipeQuery(study.id, trial.number))
  const file = useQuery(studyFile(study.id))
  return (
    <Answer of={recipe}>
      {(found) => (
        <Answer of={file}>
          {(document) => {
            const models = document.models as unknown as Models
            const unknown = elsewhere(found, models)
            return (
              <>
                <CopyField label={FORMS.merge} text={mergeCommand(SERVER, study.id, trial.number, found, models)} />
                <p className="soft">
                  {unknown.length > 0 && `Replace DIRECTORY by the directory of ${unknown.join(', ')}. `}
                  The other directories are those that the server reads.
                </p>
              </>
            )
          }}
        </Answer>
      )}
    </Answer>
  )
}

function Curl({ study, trial }: Of) {
  const found = useQuery(session)
  return (
    <Answer of={found}>
      {({ user }) => (
        <>
          <CopyField label={FORMS.curl} text={curlCommand(SERVER, study.id, trial.number, user !== null)} />
          <p className="soft">The command fetches the recipe of the merge, which mergesearch merge reads.</p>
        </>
      )}
    </Answer>
  )
}

function Continuing({ study, trial }: Of) {
  const file = useQuery(studyFile(study.id))
  return (
    <Answer of={file}>
      {(document) => (
        <>
          <CopyField
            label={FORMS.study}
            text={JSON.stringify(continuingStudy(document, study.id, trial.number), null, 2)}
          />
          <p className="soft">
            The merge is one more expert of the new study, which only this server can run: it reads the merge from here.
            Submit the file as a <Link to="/studies/new">new study</Link>.
          </p>
        </>
      )}
    </Answer>
  )
}
