/** The path of this page to which `next` leads after a login; the first view where it leads elsewhere. */
export function ownPath(next: string | undefined): string {
  // Browsers read \ as /, drop tabs and line ends, and take // as the beginning of another server's address.
  const isPath = next !== undefined && /^\/(?![/\\])[!-[\]-~]*$/.test(next)
  return isPath && !/^\/login(?![^/?#])/.test(next) ? next : '/'
}
