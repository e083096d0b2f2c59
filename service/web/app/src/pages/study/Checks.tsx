import { Link } from '@tanstack/react-router'
import type { Study, Summary } from '../../api/types'
import { count, percent, value } from '../../format'
import { verified } from '../../parts/verified'

// Reasons of failures that are written out.
const MAX_REASONS = 3

/** What was verified, and what to be careful about: each a line with a mark and words. */
export function Checks({ study, summary: found }: { study: Study; summary: Summary }) {
  return (
    <section aria-labelledby="checks">
      <h2 id="checks">Checks</h2>
      <ul style={{ listStyle: 'none', padding: 0 }}>
        <li>{verified(found.verification)}</li>
        {found.contamination.map((overlap) => (
          <li key={`${overlap.section} ${overlap.name}`}>{overlapWords(overlap)}</li>
        ))}
        {found.constraints.map(({ constraint, bound, kept_by: kept, trials }) => (
          <li key={constraint}>
            {kept > 0 ? '✓' : '⚠'} Constraint {constraint}
            {bound !== null && ` (bound ${value(bound)})`}: {count(kept)} of {count(trials)} trials at full budget keep
            to it
          </li>
        ))}
        {found.warnings.map((warning) => (
          <li key={`${warning.trial} ${warning.objective}`}>
            ⚠ trial {warning.trial}, {warning.objective}: {warning.message}
          </li>
        ))}
        <Failures study={study} rows={found.failures} />
        {found.invalid.map(({ trial, reason }) => (
          <li key={trial}>
            ⚠ trial {trial} is marked as invalid: {reason}
          </li>
        ))}
        {found.holdout_failures.map(({ trial, reason }) => (
          <li key={trial}>
            ✕ trial {trial} failed on held-out data: {reason}
          </li>
        ))}
      </ul>
    </section>
  )
}

function overlapWords({ section, name, items, exact, overlapping, share, is_allowed }: Overlap): string {
  const where = `${section === 'holdout' ? 'Held-out data' : 'Benchmark'} ${name}`
  if (overlapping === 0) return `✓ ${where}: none of ${count(items)} items occurs in the search data`
  const words = `${count(overlapping)} of ${count(items)} items (${percent(share)}) overlap with the search data`
  const equal = `, ${count(exact)} of them are equal`
  return `⚠ ${where}: ${words}${exact > 0 ? equal : ''}${is_allowed ? '; the study file allows it' : ''}`
}

type Overlap = Summary['contamination'][number]

/** How many trials failed, the most frequent reasons, and the link to all of them. */
function Failures({ study, rows }: { study: Study; rows: Summary['failures'] }) {
  if (rows.length === 0) return null
  const byReason = new Map<string, Summary['failures']>()
  for (const row of rows) byReason.set(row.reason, [...(byReason.get(row.reason) ?? []), row])
  const reasons = [...byReason].toSorted((a, b) => b[1].length - a[1].length)
  return (
    <li>
      ✕{' '}
      <Link to="/studies/$id/trials" params={{ id: study.id }} search={{ state: 'FAIL' }}>
        {count(rows.length)} {rows.length === 1 ? 'trial' : 'trials'} failed
      </Link>
      <ul>
        {reasons.slice(0, MAX_REASONS).map(([reason, own]) => (
          <li key={reason}>
            {reason}{' '}
            <span className="soft">
              ({own.length === 1 ? `trial ${own[0]!.trial}` : `${count(own.length)} trials, first ${own[0]!.trial}`})
            </span>
          </li>
        ))}
      </ul>
      {reasons.length > MAX_REASONS && (
        <span className="soft">and {count(reasons.length - MAX_REASONS)} other reasons</span>
      )}
    </li>
  )
}
