import { type FocusEvent, useEffect, useRef } from 'react'

/**
 * Keeps the focus in a row of buttons that come and go: where the button with the focus is removed, the button with the
 * same `data-place` gets it, or else the first one. A button that is disabled while its request runs gets it back.
 *
 * The result has the attributes of the row.
 */
export function useKeptFocus<E extends HTMLElement>() {
  const ref = useRef<E>(null)
  const held = useRef<HTMLButtonElement>(null)
  useEffect(() => {
    const button = held.current
    if (button === null || document.activeElement !== document.body) return
    const all = [...(ref.current?.querySelectorAll('button') ?? [])]
    const same = button.isConnected ? button : all.find((each) => each.dataset.place === button.dataset.place)
    // One that is disabled is waited for.
    const next = same ?? all.find((each) => !each.disabled)
    if (next?.disabled === false) next.focus({ preventScroll: true })
  })
  const onFocus = ({ target }: FocusEvent<E>) => {
    if (target instanceof HTMLButtonElement) held.current = target
  }
  const onBlur = ({ target, relatedTarget: to }: FocusEvent<E>) => {
    const button = held.current
    if (button === null || !button.isSameNode(target)) return
    const leave = () => {
      if (held.current === button) held.current = null
    }
    if (to) {
      if (to.closest('[role=dialog]') === null) leave() // a dialog gives the focus back
      return
    }
    // Afterwards it is known whether the button was removed or disabled, or the whole window was left.
    window.setTimeout(() => {
      if (button.isConnected && !button.disabled && document.activeElement !== button) leave()
    })
  }
  return { ref, onFocus, onBlur }
}
