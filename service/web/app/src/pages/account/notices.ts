import type { Webhook } from '../../api/types'

/** A change of a job that is sent to webhooks and addresses. */
export type Notice = Webhook['events'][number]

export const NOTICES: readonly Notice[] = ['complete', 'failed', 'waiting', 'paused', 'cancelled']

/** What is sent unless something else is chosen. */
export const USUAL: readonly Notice[] = ['complete', 'failed', 'waiting']
