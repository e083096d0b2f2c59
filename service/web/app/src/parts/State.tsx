/** A shape for each state, so that colour is not the only sign. */
const SHAPES: Record<string, string> = {
  COMPLETE: '●',
  RUNNING: '◐',
  FAILED: '✕',
  FAIL: '✕',
  PRUNED: '◌',
  PAUSED: '‖',
  WAITING: '○',
  CREATED: '○',
  STOPPED: '■',
  CANCELLED: '■',
}

/** State of a job or trial, as shape and word. */
export function State({ state }: { state: string }) {
  return (
    <span className={`state ${state}`}>
      <span aria-hidden="true">{SHAPES[state] ?? '○'}</span> {state.toLowerCase()}
    </span>
  )
}
