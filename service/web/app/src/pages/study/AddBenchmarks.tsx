import { Button, Textarea } from '@mantine/core'
import { useState } from 'react'
import { useChange } from '../../api/change'
import { api } from '../../api/client'
import type { Study } from '../../api/types'
import { Failure } from '../../parts/Answer'

const EXAMPLE = `benchmarks:
  - {name: piqa, task: piqa, metric: acc, group: common sense}
`

/** Benchmarks in the form of a study file, which are added to a study that is complete; it then continues. */
export function AddBenchmarks({ study }: { study: Study }) {
  const [text, setText] = useState('')
  const add = useChange(
    (document: string) =>
      api.POST('/v1/studies/{study_id}/benchmarks', {
        params: { path: { study_id: study.id } },
        headers: { 'Content-Type': document.trimStart().startsWith('{') ? 'application/json' : 'application/yaml' },
        body: document as never,
        bodySerializer: (body) => body as unknown as string,
      }),
    [['study', study.id]],
  )
  return (
    <section aria-labelledby="add-benchmarks">
      <h3 id="add-benchmarks">Add benchmarks</h3>
      <p>
        The study continues, and scores the finalists, the sources and the published recipes on them, or the trials that
        a benchmark names. Nothing that is stored is scored again.
      </p>
      <form
        onSubmit={(event) => {
          event.preventDefault()
          add.mutate(text)
        }}
      >
        <Textarea
          label="Benchmarks"
          description="YAML with the key “benchmarks”, as in a study file. Its paths are absolute."
          placeholder={EXAMPLE}
          autosize
          minRows={4}
          maxRows={24}
          spellCheck={false}
          autoCapitalize="off"
          styles={{ input: { fontFamily: 'ui-monospace, monospace' } }}
          value={text}
          onChange={(event) => setText(event.currentTarget.value)}
        />
        {add.error && <Failure error={add.error} />}
        <p>
          <Button type="submit" disabled={add.isPending || text.trim() === ''}>
            Add
          </Button>
        </p>
      </form>
    </section>
  )
}
