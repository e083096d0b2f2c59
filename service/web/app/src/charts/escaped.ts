/** Text as HTML: tooltips of charts are HTML, and labels come from users. */
export function escaped(given: string): string {
  const span = document.createElement('span')
  span.textContent = given
  return span.innerHTML
}
