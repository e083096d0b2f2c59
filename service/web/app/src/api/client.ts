import createClient, { type Middleware } from 'openapi-fetch'
import { answered, lost } from './connection'
import type { paths } from './schema'
import type { Problem } from './types'

/** The path below which the server is; not empty behind a proxy that adds a prefix. */
export const BASE = new URL(document.baseURI).pathname.replace(/\/$/, '')

/** A request that the server refused, with the problem document of its answer (RFC 9457). */
export class Refused extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail)
  }
}

/** The server could not be reached, or did not answer as itself. */
export class Unreachable extends Error {}

let csrfToken: string | null = null

/** Sets the token that requests which change something send along, while the browser has a session. */
export function useCsrfToken(token: string | null): void {
  csrfToken = token
}

const refusals: Middleware = {
  onRequest({ request }) {
    if (csrfToken !== null && request.method !== 'GET') request.headers.set('X-CSRF-Token', csrfToken)
    return request
  },
  async onResponse({ response }) {
    const isProblem = response.headers.get('content-type')?.startsWith('application/problem+json')
    // A proxy answers in place of a server that is away.
    if (response.ok || isProblem) answered(response.headers.get('date'))
    else lost()
    if (isProblem) throw new Refused(await response.json())
    if (!response.ok) throw new Unreachable(`the server answered ${response.status} ${response.statusText}`)
  },
  onError({ error }) {
    if (error instanceof DOMException && error.name === 'AbortError') return
    lost()
    return new Unreachable('the server does not answer')
  },
}

/** The HTTP API. Answers with errors are thrown, as `Refused` or `Unreachable`. */
export const api = createClient<paths>({ baseUrl: BASE, credentials: 'same-origin' })
api.use(refusals)
