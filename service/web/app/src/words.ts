/** Differences between two texts, word by word. */

/** A run of a text's characters; `isOwn` if the other text does not have it at this place. */
export interface Run {
  text: string
  isOwn: boolean
}

// Largest table of word pairs that is compared; of longer texts, the middle counts as different as a whole.
const MAX_CELLS = 1_000_000

/**
 * The two texts as runs of equal and of own words. The equal words are a longest common subsequence; the runs of each
 * text joined are the text.
 */
export function wordDifferences(a: string, b: string): [Run[], Run[]] {
  const left = words(a)
  const right = words(b)
  let start = 0
  while (start < left.length && start < right.length && left[start] === right[start]) start += 1
  let end = 0
  while (end < Math.min(left.length, right.length) - start && left.at(-1 - end) === right.at(-1 - end)) end += 1
  const isOwn: [boolean[], boolean[]] = [left.map(() => false), right.map(() => false)]
  const [m, n] = [left.length - start - end, right.length - start - end]
  const table = (m + 1) * (n + 1) <= MAX_CELLS ? commonLengths(left, right, start, m, n) : undefined
  const at = (i: number, j: number) => table?.[i * (n + 1) + j] ?? 0
  let i = 0
  let j = 0
  while (i < m || j < n) {
    if (table && i < m && j < n && left[start + i] === right[start + j]) {
      i += 1
      j += 1
    } else if (i < m && (j === n || at(i + 1, j) >= at(i, j + 1))) isOwn[0][start + i++] = true
    else isOwn[1][start + j++] = true
  }
  return [runs(left, isOwn[0]), runs(right, isOwn[1])]
}

/** Words, the spaces between them, and single marks. */
const words = (text: string) => text.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? []

/** Lengths of the longest common subsequences of the rests of two lists, by the places where the rests begin. */
function commonLengths(left: string[], right: string[], start: number, m: number, n: number): Uint32Array {
  const table = new Uint32Array((m + 1) * (n + 1))
  for (let i = m - 1; i >= 0; i -= 1) {
    for (let j = n - 1; j >= 0; j -= 1) {
      const here = i * (n + 1) + j
      table[here] =
        left[start + i] === right[start + j]
          ? table[here + n + 2]! + 1
          : Math.max(table[here + n + 1]!, table[here + 1]!)
    }
  }
  return table
}

function runs(all: string[], isOwn: boolean[]): Run[] {
  const found: Run[] = []
  all.forEach((text, k) => {
    const last = found.at(-1)
    if (last && last.isOwn === isOwn[k]) last.text += text
    else found.push({ text, isOwn: isOwn[k]! })
  })
  return found
}
