import { Button } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { BASE, api } from '../api/client'
import { useMay } from '../api/rights'
import type { Export, Study } from '../api/types'
import { Failure } from './Answer'

export const DTYPES = ['float32', 'bfloat16', 'float16'] as const

export interface ExportRequest {
  trial?: number | 'best'
  prefer?: Record<string, number>
  dtype?: (typeof DTYPES)[number]
}

/** Address of an export's files; the links of the server lack a prefix that a proxy has removed. */
export const downloadOf = (study: Study, { id }: Export) => `${BASE}/v1/studies/${study.id}/exports/${id}/download`

/** Begins an export of a merged model, and says where it is. Nothing where the server would refuse it. */
export function ExportButton(props: { study: Study; label: string; request: ExportRequest; isDisabled?: boolean }) {
  const { study, label, request, isDisabled } = props
  const client = useQueryClient()
  const canUse = useMay(study, 'use')
  const begin = useMutation({
    mutationFn: async () => {
      const params = { path: { study_id: study.id } }
      const body = request as never // fields that are left out have defaults
      return (await api.POST('/v1/studies/{study_id}/exports', { params, body })).data!
    },
    onSuccess: () => client.invalidateQueries({ queryKey: ['study', study.id, 'exports'] }),
  })
  if (!canUse || study.state !== 'COMPLETE') return null
  return (
    <>
      <Button size="xs" loading={begin.isPending} disabled={isDisabled} onClick={() => begin.mutate()}>
        {label}
      </Button>
      <div role="status">{begin.data && <Begun study={study} begun={begin.data} />}</div>
      {begin.error && <Failure error={begin.error} />}
    </>
  )
}

function Begun({ study, begun }: { study: Study; begun: Export }) {
  const { trial, dtype, links } = begun
  return (
    <p>
      {links.download ? `The export of trial ${trial} in ${dtype} is ready` : `Export of trial ${trial} has begun`}:{' '}
      {links.download ? (
        <a href={downloadOf(study, begun)} download>
          download
        </a>
      ) : (
        <Link to="/studies/$id/exports" params={{ id: study.id }}>
          exports
        </Link>
      )}
    </p>
  )
}
