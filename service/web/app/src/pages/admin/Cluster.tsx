import { Alert, Progress } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { api } from '../../api/client'
import type { components } from '../../api/schema'
import { BASE } from '../../api/client'
import { useSession } from '../../api/session'
import { bytes, count } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Page } from '../../parts/Page'

type Cluster = components['schemas']['ClusterDocument']
type Node = Cluster['nodes'][number]
type Used = Cluster['disk']

/** The nodes of the Ray cluster with what is used of each, the server's disk and database, and versions of the parts. */
export function Cluster() {
  const { user, administers, may_read_dashboard } = useSession()
  const mayRead = user === null || administers
  const cluster = useQuery({
    queryKey: ['cluster'],
    queryFn: async ({ signal }) => (await api.GET('/v1/cluster', { signal })).data!,
    refetchInterval: 5000,
    enabled: mayRead,
  })
  return (
    <Page title="Cluster">
      {mayRead ? (
        <Answer of={cluster}>
          {(found) => (
            <>
              {found.not_ready !== null && (
                <Alert color="orange" variant="outline" title="No job can continue" my="sm">
                  {found.not_ready}
                </Alert>
              )}
              <h2>Nodes</h2>
              {found.nodes_problem !== null ? (
                <p>✕ The nodes are not known: {found.nodes_problem}.</p>
              ) : found.nodes.length === 0 ? (
                <Nothing>Ray has no node.</Nothing>
              ) : (
                <Nodes nodes={found.nodes} />
              )}
              {may_read_dashboard && (
                <p>
                  <a href={`${BASE}/ray/`}>Ray’s dashboard</a> shows processes and logs.
                </p>
              )}
              <h2>Server</h2>
              <Facts
                rows={[
                  ['disk', <Share key="disk" of={found.disk} label="Used of the server’s disk" />],
                  ['database', `${found.database.kind}, schema ${found.database.revision}`],
                ]}
              />
              <h2>Versions</h2>
              <Facts rows={Object.entries(found.versions)} />
            </>
          )}
        </Answer>
      ) : (
        <Nothing>Only administrators of the server see its cluster.</Nothing>
      )}
    </Page>
  )
}

function Facts({ rows }: { rows: [string, React.ReactNode][] }) {
  return (
    <dl className="facts">
      {rows.map(([term, value]) => (
        <div key={term}>
          <dt>{term}</dt>
          <dd>{value}</dd>
        </div>
      ))}
    </dl>
  )
}

function Nodes({ nodes }: { nodes: Node[] }) {
  const gpus = nodes.reduce((sum, node) => sum + node.gpus.length, 0)
  const alive = nodes.filter((node) => node.is_alive).length
  return (
    <>
      <p>
        {count(alive)} of {count(nodes.length)} {nodes.length === 1 ? 'node' : 'nodes'} alive, with {count(gpus)}{' '}
        {gpus === 1 ? 'GPU' : 'GPUs'}.
      </p>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="wide" tabIndex={0} role="region" aria-label="Table of nodes">
        <table className="data">
          <thead>
            <tr>
              {['node', 'state', 'processors', 'memory', 'disk', 'GPUs'].map((head) => (
                <th key={head} scope="col" className="l">
                  {head}
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {nodes.map((node) => (
              <tr key={node.id}>
                <th scope="row" className="l">
                  {node.host}
                  <small>
                    {node.address}
                    {node.is_head && ', head'}
                  </small>
                </th>
                <td className="l">{node.is_alive ? '● alive' : '✕ dead'}</td>
                <td className="l">
                  {node.num_cpus !== null && count(node.num_cpus)}
                  {node.cpu_percent !== null && <small>{node.cpu_percent.toFixed(0)} % busy</small>}
                </td>
                <td className="l">
                  <Share of={node.memory} label={`Used memory of ${node.host}`} />
                </td>
                <td className="l">
                  <Share of={node.disk} label={`Used disk of ${node.host}`} />
                </td>
                <td className="l">
                  {node.gpus.length === 0 ? (
                    <span className="soft">none</span>
                  ) : (
                    node.gpus.map((gpu, k) => (
                      // oxlint-disable-next-line react/no-array-index-key
                      <div key={k}>
                        {gpu.name}
                        {gpu.percent !== null && <small>{gpu.percent.toFixed(0)} % busy</small>}
                        <Share of={gpu.memory} label={`Used memory of GPU ${k} of ${node.host}`} />
                      </div>
                    ))
                  )}
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </>
  )
}

/** What is used of a memory or disk, as a text and a bar. */
function Share({ of: { used, total }, label }: { of: Used; label: string }) {
  if (total === 0) return <span className="soft">unknown</span>
  return (
    <div style={{ maxWidth: 220 }}>
      {bytes(used)} of {bytes(total)}
      <Progress aria-label={label} value={Math.min(100, (100 * used) / total)} />
    </div>
  )
}
