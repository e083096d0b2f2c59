import { Autocomplete, Button, TextInput, Textarea } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { Link } from '@tanstack/react-router'
import { useEffect, useMemo, useRef, useState } from 'react'
import { api } from '../../api/client'
import { useLive } from '../../api/live'
import { served as servedQuery, summary } from '../../api/queries'
import { useMay } from '../../api/rights'
import type { ServedProgress, ServedStudy } from '../../api/types'
import { count, duration } from '../../format'
import { Answer, Failure, Nothing } from '../../parts/Answer'
import { JobActions } from '../../parts/JobActions'
import { JobHead, JobNotes } from '../../parts/JobHead'
import { Page } from '../../parts/Page'
import { servedRoute } from '../../router'
import type { Turn } from './completions'
import { useChat } from './useChat'
import { isFinished } from '../../api/jobs'

const RETRY_MS = 5000
const NONE: readonly Turn[] = []

/** A served study: what it waits for, when it ends, and a chat with one of its trials, or with two side by side. */
export function Chat() {
  const { id } = servedRoute.useParams()
  const query = useQuery(servedQuery(id))
  const key = ['served', id]
  const { progress, connection } = useLive<ServedProgress>(`/v1/served/${id}`, key, query.data?.last_event_id)
  return (
    <Answer of={query} title="Chat">
      {(served) => (
        <Page title={served.name} before={<JobHead job={served} connection={connection} />}>
          <JobNotes job={served} />
          <JobActions
            kind="serving"
            job={served}
            queryKey={key}
            cancelled={
              <p>Its engine is freed, and answers that are being generated end. The study can be served again.</p>
            }
            deleted={<p>The served study is deleted. Its study and trials are kept.</p>}
          >
            <Link to="/studies/$id" params={{ id: served.study }}>
              Study
            </Link>
          </JobActions>
          {isFinished(served) ? (
            <Nothing>Serving has ended. To chat, serve a trial of the study again.</Nothing>
          ) : (
            <>
              <Serving progress={progress ?? served.progress} />
              <Trials served={served} />
            </>
          )}
        </Page>
      )}
    </Answer>
  )
}

/** Which engine answers, and when serving ends. */
function Serving({ progress }: { progress: ServedProgress | null }) {
  if (progress === null) return null
  const engine = {
    scorer: 'An engine of searches answers.',
    own: 'An engine of its own answers.',
  }
  return (
    <p className="soft">
      {progress.engine === null ? 'No engine answers now.' : engine[progress.engine]} {count(progress.requests)}{' '}
      {progress.requests === 1 ? 'request' : 'requests'} so far. Serving ends in {duration(progress.ends_in_s)} if no
      request comes.
    </p>
  )
}

/** The chat, as soon as the served study says which trials it has. */
function Trials({ served }: { served: ServedStudy }) {
  const { trials } = servedRoute.useSearch()
  const mayUse = useMay(served, 'use')
  const models = useQuery({
    // Not below the key of the served study: at its end, events would request the trials of what serves nothing.
    queryKey: ['models', served.id],
    queryFn: async ({ signal }) => {
      const params = { path: { served_id: served.id } }
      return (await api.GET('/v1/served/{served_id}/openai/v1/models', { params, signal })).data!.data
    },
    enabled: mayUse,
    retry: false,
    refetchInterval: ({ state }) => (state.status === 'error' ? RETRY_MS : false),
  })
  const results = useQuery({ ...summary(served.study), enabled: mayUse && trials === undefined })
  if (!mayUse) return <Nothing>You may read this served study, but not chat with it.</Nothing>
  if (models.isError && models.data === undefined)
    return <Failure error={models.error} retry={() => models.refetch()} />
  return (
    <Answer of={models}>
      {(found) => {
        const best = results.data?.best?.trial ?? found[0]?.id
        const chosen = trials?.split(',').filter(Boolean) ?? (best === undefined ? [] : [`${best}`])
        const isLoading = trials === undefined && results.isPending
        if (found.length === 0) return <Nothing>The study has no trials yet.</Nothing>
        return isLoading ? <Nothing>Loading</Nothing> : <Chats id={served.id} models={found} chosen={chosen} />
      }}
    </Answer>
  )
}

type Models = readonly { id: string; label: string }[]

function Chats({ id, models, chosen }: { id: string; models: Models; chosen: string[] }) {
  const navigate = servedRoute.useNavigate()
  const { chats, isBusy, send, stop, clear } = useChat(id)
  const [prompt, setPrompt] = useState('')
  const [temperature, setTemperature] = useState('')
  const [maxTokens, setMaxTokens] = useState('')
  const [first = '', second = ''] = chosen
  const trials = [...new Set([first, second])].filter(Boolean)
  const choose = (...names: string[]) =>
    navigate({ search: { trials: names.filter(Boolean).join(',') || undefined }, replace: true })
  const submit = () => {
    if (isBusy || prompt.trim() === '' || trials.length === 0) return
    setPrompt('')
    void send(trials, prompt, {
      temperature: temperature === '' ? undefined : Number(temperature),
      max_tokens: maxTokens === '' ? undefined : Number(maxTokens),
    })
  }
  return (
    <>
      <div className="row" style={{ alignItems: 'end' }}>
        <ChooseTrial
          key={`1 ${first}`}
          label="Trial"
          models={models}
          value={first}
          onChange={(n) => choose(n, second)}
        />
        <ChooseTrial
          key={`2 ${second}`}
          label="Beside it (optional)"
          models={models}
          value={second}
          onChange={(n) => choose(first, n)}
        />
        <TextInput
          label="Temperature"
          type="number"
          min={0}
          max={2}
          step={0.1}
          placeholder="1"
          w={110}
          value={temperature}
          onChange={(event) => setTemperature(event.currentTarget.value)}
        />
        <TextInput
          label="Tokens at most"
          type="number"
          min={1}
          step={1}
          placeholder="all"
          w={120}
          value={maxTokens}
          onChange={(event) => setMaxTokens(event.currentTarget.value)}
        />
      </div>
      <div className={trials.length > 1 ? 'halves' : ''}>
        {trials.map((trial) => (
          <Log
            key={trial}
            trial={trial}
            label={models.find((model) => model.id === trial)?.label}
            turns={chats[trial] ?? NONE}
            isBusy={isBusy}
          />
        ))}
      </div>
      <form
        onSubmit={(event) => {
          event.preventDefault()
          submit()
        }}
      >
        <Textarea
          label="Message"
          description="Enter sends it, Shift and Enter begin a new line."
          autosize
          minRows={2}
          maxRows={12}
          value={prompt}
          onChange={(event) => setPrompt(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key !== 'Enter' || event.shiftKey || event.nativeEvent.isComposing) return
            event.preventDefault()
            submit()
          }}
        />
        <div className="row" style={{ marginTop: 10 }}>
          {isBusy ? (
            <Button variant="default" onClick={stop}>
              Stop
            </Button>
          ) : (
            <Button type="submit" disabled={prompt.trim() === ''}>
              Send
            </Button>
          )}
          <Button variant="default" onClick={clear}>
            Clear
          </Button>
        </div>
      </form>
    </>
  )
}

/** A trial by its number or the label of a baseline; what the server does not know, it refuses by name. */
function ChooseTrial(props: { label: string; models: Models; value: string; onChange: (name: string) => void }) {
  const { label, models, value, onChange } = props
  const [draft, setDraft] = useState(value)
  const labels = useMemo(() => new Map(models.map((model) => [model.id, model.label])), [models])
  const take = (name: string) => name.trim() !== value && onChange(name.trim())
  const text = (id: string) => `${id} ${labels.get(id)}`
  return (
    <Autocomplete
      label={label}
      w={190}
      data={models.map((model) => model.id)}
      limit={20}
      filter={({ options, search, limit }) => {
        // Before something is typed, all trials are offered.
        const wanted = search === value ? '' : search.trim()
        return options.filter((option) => 'value' in option && text(option.value).includes(wanted)).slice(0, limit)
      }}
      renderOption={({ option }) => text(option.value)}
      value={draft}
      onChange={setDraft}
      onOptionSubmit={take}
      onBlur={() => take(draft)}
      onKeyDown={(event) => event.key === 'Enter' && take(draft)}
    />
  )
}

/** What was said in the chat with one trial. */
function Log(props: { trial: string; label: string | undefined; turns: readonly Turn[]; isBusy: boolean }) {
  const { trial, label, turns, isBusy } = props
  const name = /^\d+$/.test(trial) ? `Trial ${trial}` : trial
  const box = useRef<HTMLDivElement>(null)
  useEffect(() => {
    box.current?.scrollTo({ top: box.current.scrollHeight })
  }, [turns])
  return (
    <section>
      <h2>
        {name}
        {label !== undefined && label !== trial && <span className="soft"> {label}</span>}
      </h2>
      {/* oxlint-disable-next-line jsx-a11y/no-noninteractive-tabindex */}
      <div className="chat" ref={box} role="log" aria-label={`Chat with ${name}`} aria-busy={isBusy} tabIndex={0}>
        {turns.length === 0 && <Nothing>Nothing was said yet.</Nothing>}
        {turns.map((turn, k) => (
          // oxlint-disable-next-line react/no-array-index-key
          <div key={k}>
            <p className="said">
              <span className="soft">You: </span>
              {turn.prompt}
            </p>
            <p hidden={turn.answer === '' && turn.problem !== undefined}>
              <span className="soft">{name}: </span>
              {turn.answer}
              {turn.isCut && <span className="soft"> (cut: as many tokens as were allowed)</span>}
            </p>
            {turn.problem !== undefined && <p className="bad">✕ {turn.problem}</p>}
          </div>
        ))}
      </div>
    </section>
  )
}
