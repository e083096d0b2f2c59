import { NativeSelect, NumberInput } from '@mantine/core'
import { useMutation, useQuery, useQueryClient } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useState } from 'react'
import { api } from '../../api/client'
import { exports as exportsQuery, pareto } from '../../api/queries'
import { useMay } from '../../api/rights'
import type { Export, Study } from '../../api/types'
import { bytes, localTime } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { ConfirmButton } from '../../parts/ConfirmButton'
import { DTYPES, ExportButton, type ExportRequest, downloadOf } from '../../parts/ExportButton'
import { State } from '../../parts/State'
import { useStudy } from './StudyLayout'

/** The exports of a study, which are merged models for download, and a form that begins one. */
export function Exports() {
  const { study } = useStudy()
  const canUse = useMay(study, 'use')
  const found = useQuery(exportsQuery(study.id))
  return (
    <>
      <h2>Exports</h2>
      <Answer of={found}>{(all) => <Table study={study} exports={all} />}</Answer>
      {canUse && study.state === 'COMPLETE' && <Begin study={study} />}
      {study.state !== 'COMPLETE' && <Nothing>Models are exported once the study is complete.</Nothing>}
    </>
  )
}

function Table({ study, exports }: { study: Study; exports: Export[] }) {
  const client = useQueryClient()
  const canUse = useMay(study, 'use')
  const remove = useMutation({
    mutationFn: (id: string) => {
      const params = { path: { study_id: study.id, export_id: id } }
      return api.DELETE('/v1/studies/{study_id}/exports/{export_id}', { params })
    },
    onSettled: () => client.invalidateQueries({ queryKey: ['study', study.id, 'exports'] }),
  })
  if (exports.length === 0) return <Nothing>No model of the study has been exported.</Nothing>
  return (
    <>
      {remove.error && <Failure error={remove.error} />}
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Exports of the study">
        <table className="data">
          <thead>
            <tr>
              <th scope="col">trial</th>
              <th scope="col" className="l">
                dtype
              </th>
              <th scope="col" className="l">
                state
              </th>
              <th scope="col">size</th>
              <th scope="col">begun</th>
              <th scope="col">model</th>
              {canUse && <td />}
            </tr>
          </thead>
          <tbody>
            {exports.map((each) => (
              <tr key={each.id}>
                <th scope="row">
                  <Link to="/studies/$id/trials/$number" params={{ id: study.id, number: `${each.trial}` }}>
                    {each.trial}
                  </Link>
                </th>
                <td className="l">{each.dtype}</td>
                <td className="l wrap">
                  <State state={each.state} /> {each.reason}
                </td>
                <td>{each.bytes !== null && bytes(each.bytes)}</td>
                <td>
                  <time dateTime={each.created_at} title={each.created_at}>
                    {localTime(each.created_at)}
                  </time>
                </td>
                <td>
                  <Model study={study} of={each} />
                </td>
                {canUse && (
                  <td>
                    <ConfirmButton
                      verb="Delete"
                      label={`Delete ${nameOf(each)}`}
                      question={`Delete ${nameOf(each)} and its files? It can be exported again.`}
                      onConfirm={() => remove.mutate(each.id)}
                    />
                  </td>
                )}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  )
}

const nameOf = ({ trial, dtype }: Export) => `the export of trial ${trial} in ${dtype}`

/** The link to an export's files, or why there is none. */
function Model({ study, of: each }: { study: Study; of: Export }) {
  if (each.links.download)
    return (
      <a href={downloadOf(study, each)} download aria-label={`Download ${nameOf(each)}`}>
        Download
      </a>
    )
  return <span className="soft">{each.state === 'COMPLETE' ? 'removed from the server' : ''}</span>
}

const KINDS = { best: 'the best trial', trial: 'a trial', weights: 'the trial that weights pick' } as const

type Kind = keyof typeof KINDS

/** The form that begins an export: of the best trial, of a trial by its number, or of the one that weights pick. */
function Begin({ study }: { study: Study }) {
  const front = useQuery(pareto(study.id))
  const names = front.data?.objectives.map(({ name }) => name) ?? []
  const [kind, setKind] = useState<Kind>('best')
  const [trial, setTrial] = useState<number | ''>('')
  const [weights, setWeights] = useState<Record<string, number>>({})
  const [dtype, setDtype] = useState<string>()
  const kinds = (Object.keys(KINDS) as Kind[]).filter((each) => each !== 'weights' || names.length > 1)
  return (
    <section aria-labelledby="begin">
      <h3 id="begin">Begin an export</h3>
      <div className="row" style={{ alignItems: 'end' }}>
        <NativeSelect
          label="Export"
          data={kinds.map((each) => ({ value: each, label: KINDS[each] }))}
          value={kind}
          onChange={(event) => setKind(event.currentTarget.value as Kind)}
        />
        {kind === 'trial' && (
          <NumberInput
            label="Trial"
            min={0}
            allowDecimal={false}
            value={trial}
            onChange={(given) => setTrial(given === '' ? '' : Number(given))}
          />
        )}
        {kind === 'weights' &&
          names.map((name) => (
            <NumberInput
              key={name}
              label={`Weight of ${name}`}
              min={0}
              max={100}
              value={weights[name] ?? 50}
              onChange={(given) => setWeights((old) => ({ ...old, [name]: Number(given) }))}
            />
          ))}
        <NativeSelect
          label="dtype"
          data={[{ value: '', label: 'dtype of the engines' }, ...DTYPES]}
          value={dtype ?? ''}
          onChange={(event) => setDtype(event.currentTarget.value || undefined)}
        />
        <ExportButton
          study={study}
          label="Begin"
          isDisabled={kind === 'trial' && trial === ''}
          request={{ ...chosen(kind, Number(trial), names, weights), dtype } as ExportRequest}
        />
      </div>
      {kind === 'weights' && (
        <p className="soft">Weights are divided by their sum. The server picks the trial of the front.</p>
      )}
    </section>
  )
}

function chosen(kind: Kind, trial: number, names: string[], weights: Record<string, number>): ExportRequest {
  if (kind === 'best') return { trial: 'best' }
  if (kind === 'trial') return { trial }
  const given = names.map((name) => weights[name] ?? 50)
  const total = given.reduce((a, b) => a + b, 0)
  // Weights that are all 0 prefer no objective to another, as equal ones do.
  const shares = given.map((weight) => (total > 0 ? weight / total : 1 / names.length))
  return { prefer: Object.fromEntries(names.map((name, k) => [name, shares[k]!])) }
}
