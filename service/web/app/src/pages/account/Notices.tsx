import { NOTICES, type Notice } from './notices'

/** A choice of the changes of jobs that are sent. */
export function Notices({ value, onChange }: { value: readonly Notice[]; onChange: (events: Notice[]) => void }) {
  return (
    <fieldset>
      <legend>Sent when a job is</legend>
      {NOTICES.map((notice) => (
        <label key={notice}>
          <input
            type="checkbox"
            checked={value.includes(notice)}
            onChange={({ currentTarget }) =>
              onChange(NOTICES.filter((each) => (each === notice ? currentTarget.checked : value.includes(each))))
            }
          />{' '}
          {notice}
        </label>
      ))}
    </fieldset>
  )
}
