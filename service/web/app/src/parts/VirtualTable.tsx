import { keepPreviousData, useQuery, type QueryKey } from '@tanstack/react-query'
import { useVirtualizer } from '@tanstack/react-virtual'
import { type ReactNode, useEffect, useRef, useState } from 'react'
import { count } from '../format'
import { Failure } from './Answer'
import { Status } from './Status'

export interface Column<T> {
  /** Name of the field in the query parameter `sort`; columns without one are not sorted. */
  sort?: string
  head: string
  isText?: boolean
  cell: (row: T) => ReactNode
  /** The cell as a text, for a file of the table; columns without it are not in the file. */
  text?: (row: T) => string | number | null | undefined
}

export interface Page<T> {
  rows: T[]
  total: number
}

const PAGE = 100
const ROW_PX = 33

/**
 * A table of any length: the server sorts and pages, and only the rows in view are requested and in the document.
 * `sort` is the field by which the rows are sorted, with a minus for the largest first.
 */
export function VirtualTable<T>(props: {
  label: string
  columns: Column<T>[]
  queryKey: QueryKey
  load: (offset: number, limit: number, signal: AbortSignal) => Promise<Page<T>>
  sort: string
  onSort: (sort: string) => void
  noun: string
  /** The index of a row that is scrolled to, marked, and whose first cell's link gets the focus. */
  at?: number
}) {
  const { label, columns, queryKey, load, sort, onSort, noun, at } = props
  const box = useRef<HTMLDivElement>(null)
  const [top, setTop] = useState(0)
  const page = (offset: number) => ({
    queryKey: [...queryKey, sort, offset],
    queryFn: ({ signal }: { signal: AbortSignal }) => load(offset, PAGE, signal),
    placeholderData: keepPreviousData,
  })
  const pages = [useQuery(page(top)), useQuery(page(top + PAGE))]
  const total = pages[0]!.data?.total ?? 0
  const virtual = useVirtualizer({
    count: total,
    getScrollElement: () => box.current,
    estimateSize: () => ROW_PX,
    overscan: 12,
  })
  const items = virtual.getVirtualItems()
  const start = items[0]?.index ?? 0
  useEffect(() => setTop(Math.floor(start / PAGE) * PAGE), [start])
  const rowAt = (index: number) => {
    const k = index - top
    const found = pages[Math.floor(k / PAGE)]
    return found && !found.isPlaceholderData ? found.data?.rows[k % PAGE] : undefined
  }
  const isThere = at !== undefined && at < total
  useEffect(() => {
    if (isThere) virtual.scrollToIndex(at, { align: 'center' })
  }, [virtual, at, isThere])
  const isLoaded = isThere && items.some(({ index }) => index === at) && rowAt(at) !== undefined
  useEffect(() => {
    if (isLoaded) box.current?.querySelector<HTMLElement>('.picked th a')?.focus()
  }, [at, isLoaded])
  const error = pages.find((each) => each.error)?.error
  const failure = error && (
    <Failure error={error} isOld={pages[0]!.data !== undefined} retry={() => pages.forEach((each) => each.refetch())} />
  )
  if (failure && pages[0]!.data === undefined) return failure
  return (
    <>
      {failure}
      <Status
        text={pages[0]!.data ? `${count(total)} ${total === 1 ? noun : `${noun}s`}` : 'Loading'}
        cause={JSON.stringify(queryKey)}
      />
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="scroll" ref={box} tabIndex={0} role="region" aria-label={label}>
        <table className="data" aria-rowcount={total + 1}>
          <thead>
            <tr aria-rowindex={1}>
              {columns.map((column) => (
                <Head key={column.head} column={column} sort={sort} onSort={onSort} />
              ))}
            </tr>
          </thead>
          <tbody>
            <Space height={items[0]?.start ?? 0} width={columns.length} />
            {items.map((item) => {
              const row = rowAt(item.index)
              return (
                <tr
                  key={item.index}
                  aria-rowindex={item.index + 2}
                  aria-current={item.index === at ? true : undefined}
                  className={item.index === at ? 'picked' : undefined}
                  style={{ height: ROW_PX }}
                >
                  {columns.map((column, k) =>
                    k === 0 ? (
                      <th key={column.head} scope="row" className={column.isText ? 'l' : ''}>
                        {row && column.cell(row)}
                      </th>
                    ) : (
                      <td key={column.head} className={column.isText ? 'l' : ''}>
                        {row && column.cell(row)}
                      </td>
                    ),
                  )}
                </tr>
              )
            })}
            <Space height={virtual.getTotalSize() - (items.at(-1)?.end ?? 0)} width={columns.length} />
          </tbody>
        </table>
      </div>
    </>
  )
}

function Head<T>(props: { column: Column<T>; sort: string; onSort: (sort: string) => void }) {
  const { column, sort, onSort } = props
  const own = column.sort
  const isUp = sort === own
  const isDown = sort === `-${own}`
  const order = isUp ? 'ascending' : isDown ? 'descending' : 'none'
  return (
    <th scope="col" className={column.isText ? 'l' : ''} aria-sort={own === undefined ? undefined : order}>
      {own === undefined ? (
        column.head
      ) : (
        <button type="button" onClick={() => onSort(isDown ? own : `-${own}`)}>
          {column.head}
          <span aria-hidden="true">{isUp ? ' ▲' : isDown ? ' ▼' : ''}</span>
        </button>
      )}
    </th>
  )
}

/** The height of rows that are not in the document. */
function Space({ height, width }: { height: number; width: number }) {
  if (height <= 0) return null
  return (
    <tr aria-hidden="true" style={{ height }}>
      <td colSpan={width} style={{ padding: 0, border: 0 }} />
    </tr>
  )
}
