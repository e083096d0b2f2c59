import { Checkbox } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useEffect, useMemo, useRef, useState } from 'react'
import { api } from '../../api/client'
import { isFinished } from '../../api/jobs'
import { afterFailure } from '../../api/retry'
import { count } from '../../format'
import { Answer, Nothing } from '../../parts/Answer'
import { Download } from '../../parts/Download'
import { useStudy } from './StudyLayout'

const REFETCH_MS = 3000
// Lines that are shown; a browser is slow with more.
const LINES = 5000

/** What the drivers of a study have printed. */
export function Log() {
  const { study } = useStudy()
  const log = useQuery({
    queryKey: ['study', study.id, 'log'],
    queryFn: async ({ signal }) => {
      const params = { path: { study_id: study.id } }
      return (await api.GET('/v1/studies/{study_id}/log', { params, signal, parseAs: 'text' })).data ?? ''
    },
    refetchInterval: ({ state }) => afterFailure(state) || (!isFinished(study) && REFETCH_MS),
  })
  return (
    <>
      <h2>Log</h2>
      <Answer of={log}>
        {(text) =>
          text.trim() === '' ? (
            <Nothing>
              {study.attempt === 0 ? 'No driver has worked on the study yet.' : 'The drivers have printed nothing.'}
            </Nothing>
          ) : (
            <Printed text={text} name={`${study.name}.log`} isEnded={isFinished(study)} />
          )
        }
      </Answer>
    </>
  )
}

function Printed({ text, name, isEnded }: { text: string; name: string; isEnded: boolean }) {
  const box = useRef<HTMLDivElement>(null)
  const [follows, setFollows] = useState(true)
  const lines = useMemo(() => text.replace(/\n$/, '').split('\n'), [text])
  const shown = useMemo(() => lines.slice(-LINES).join('\n'), [lines])
  useEffect(() => {
    if (follows && box.current) box.current.scrollTop = box.current.scrollHeight
  }, [shown, follows])
  const scrolled = () => {
    const { scrollTop, scrollHeight, clientHeight } = box.current!
    setFollows(scrollTop + clientHeight >= scrollHeight - 8)
  }
  return (
    <>
      <div className="row">
        <Download text={text} name={name} />
        {!isEnded && (
          <Checkbox
            label="Follow the end"
            checked={follows}
            onChange={(event) => setFollows(event.currentTarget.checked)}
          />
        )}
        <span className="soft">
          {lines.length > LINES
            ? `the last ${count(LINES)} of ${count(lines.length)} lines`
            : lines.length === 1
              ? '1 line'
              : `${count(lines.length)} lines`}
        </span>
      </div>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div
        className="scroll log"
        ref={box}
        onScroll={scrolled}
        tabIndex={0}
        role="region"
        aria-label="Log of the drivers"
      >
        <pre>{shown}</pre>
      </div>
    </>
  )
}
