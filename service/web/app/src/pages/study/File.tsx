import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useMemo } from 'react'
import { api } from '../../api/client'
import { session as sessionQuery } from '../../api/queries'
import { maySubmit } from '../../api/rights'
import { Answer } from '../../parts/Answer'
import { CopyField } from '../../parts/CopyField'
import { Download } from '../../parts/Download'
import { asYaml } from '../studies/new/yamlText'
import { useStudy } from './StudyLayout'

/** The study file with every default, as YAML. */
export function File() {
  const { study } = useStudy()
  const file = useQuery({
    queryKey: ['study', study.id, 'file'],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: study.id } }
      return (await api.GET('/v1/studies/{study_id}/study', { params, signal })).data!
    },
  })
  return (
    <>
      <h2>Study file</h2>
      <p className="soft">With every default written out: submitted again, it makes an equal study.</p>
      <Answer of={file}>{(content) => <Text id={study.id} name={study.name} content={content} />}</Answer>
    </>
  )
}

function Text({ id, name, content }: { id: string; name: string; content: unknown }) {
  const text = useMemo(() => asYaml(content), [content])
  const session = useQuery(sessionQuery)
  return (
    <>
      <div className="row">
        <Download text={text} name={`${name}.yaml`} type="application/yaml" />
        {maySubmit(session.data) && (
          <Link to="/studies/new" search={{ from: id }}>
            Use as a new study
          </Link>
        )}
      </div>
      <CopyField label="Study file" text={text} />
    </>
  )
}
