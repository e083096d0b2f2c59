import { value } from '../format'

/** A value with one standard error, or another spread, small beside it. */
export function WithError({ value: x, error }: { value: number | null | undefined; error: number | null | undefined }) {
  return (
    <>
      {value(x)}
      {error != null && <small>± {value(error)}</small>}
    </>
  )
}
