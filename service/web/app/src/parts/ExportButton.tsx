import { Button } from '@mantine/core'
import { useMutation, useQueryClient } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { api } from '../api/client'
import { useMay } from '../api/rights'
import type { Export, Study } from '../api/types'
import { Failure } from './Answer'

export const DTYPES = ['float32', 'bfloat16', 'float16'] as const

export interface ExportRequest {
  trial?: number | 'best'
  prefer?: Record<string, number>
  dtype?: (typeof DTYPES)[number]
}

/** Begins an export of a merged model, and says where it is. Nothing where the server would refuse it. */
export function ExportButton(props: { study: Study; label: string; request: ExportRequest }) {
  const { study, label, request } = props
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
      <Button size="xs" loading={begin.isPending} onClick={() => begin.mutate()}>
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
        <a href={links.download} download>
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
