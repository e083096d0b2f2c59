import { expect, test } from 'vitest'
import { ownPath } from './next'

test('a login leads to paths of this page', () => {
  for (const path of ['/', '/studies/1/trials?sort=-mean#best', '/admin/audit?target=job+1', '/loginless'])
    expect(ownPath(path)).toBe(path)
})

test('a login leads nowhere else, and not to itself', () => {
  const elsewhere = ['https://evil.example.org', '//evil.example.org', '/\\evil', '/\t/evil', 'javascript:alert(1)']
  for (const path of [...elsewhere, undefined, '', 'evil', '/é', '/login', '/login?next=/a', '/login#a'])
    expect(ownPath(path)).toBe('/')
})
