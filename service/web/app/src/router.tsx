import {
  Outlet,
  createRootRoute,
  createRoute,
  createRouter,
  lazyRouteComponent,
  redirect,
} from '@tanstack/react-router'
import { BASE } from './api/client'
import { Broken } from './parts/Broken'
import { NotFound } from './parts/NotFound'
import { Shell } from './parts/Shell'
import { StudyList } from './pages/studies/StudyList'

// Addresses: what a view shows is in its address, so that every view can be sent to somebody else.

type Texts = Record<string, unknown>
// The router reads what looks like a number or a boolean as one.
const text = (value: unknown) => (['string', 'number', 'boolean'].includes(typeof value) && `${value}`) || undefined

/** Search parameters as texts; those without a value are left out of the address. */
function texts<K extends string>(...names: K[]): (search: Texts) => Partial<Record<K, string>> {
  return (search) => {
    const found: Partial<Record<K, string>> = {}
    for (const name of names) {
      const value = text(search[name])
      if (value !== undefined) found[name] = value
    }
    return found
  }
}

const root = createRootRoute({ component: () => <Shell children={<Outlet />} />, notFoundComponent: NotFound })

const index = createRoute({
  getParentRoute: () => root,
  path: '/',
  beforeLoad: () => {
    throw redirect({ to: '/studies' })
  },
})

export const studiesRoute = createRoute({
  getParentRoute: () => root,
  path: '/studies',
  validateSearch: texts('q', 'state', 'sort'),
  component: StudyList,
})

export const studyRoute = createRoute({
  getParentRoute: () => root,
  path: '/studies/$id',
  component: lazyRouteComponent(() => import('./pages/study/StudyLayout'), 'StudyLayout'),
})

export const overviewRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/',
  validateSearch: texts('ranges'),
  component: lazyRouteComponent(() => import('./pages/study/Overview'), 'Overview'),
})

export const trialsRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/trials',
  staticData: { view: 'Trials' },
  validateSearch: texts('sort', 'state', 'origin', 'where', 'q', 'columns', 'at'),
  component: lazyRouteComponent(() => import('./pages/study/Trials'), 'Trials'),
})

export const parametersRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/parameters',
  staticData: { view: 'Parameters' },
  validateSearch: texts('objective', 'axes', 'against', 'ranges'),
  component: lazyRouteComponent(() => import('./pages/study/Parameters'), 'Parameters'),
})

export const rungsRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/rungs',
  staticData: { view: 'Rungs' },
  validateSearch: texts('bracket', 'rung'),
  component: lazyRouteComponent(() => import('./pages/study/Rungs'), 'Rungs'),
})

export const timelineRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/timeline',
  staticData: { view: 'Timeline' },
  validateSearch: texts('from', 'to'),
  component: lazyRouteComponent(() => import('./pages/study/Timeline'), 'Timeline'),
})

export const benchmarksRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/benchmarks',
  staticData: { view: 'Benchmarks' },
  component: lazyRouteComponent(() => import('./pages/study/Benchmarks'), 'Benchmarks'),
})

export const compareRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/compare',
  staticData: { view: 'Compare' },
  validateSearch: texts('trials', 'with'),
  component: lazyRouteComponent(() => import('./pages/study/Compare'), 'Compare'),
})

export const eventsRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/events',
  staticData: { view: 'Events' },
  validateSearch: texts('kind', 'sort'),
  component: lazyRouteComponent(() => import('./pages/study/Events'), 'Events'),
})

export const logRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/log',
  staticData: { view: 'Log' },
  component: lazyRouteComponent(() => import('./pages/study/Log'), 'Log'),
})

export const fileRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/file',
  staticData: { view: 'File' },
  component: lazyRouteComponent(() => import('./pages/study/File'), 'File'),
})

export const exportsRoute = createRoute({
  getParentRoute: () => studyRoute,
  path: '/exports',
  staticData: { view: 'Exports' },
  component: lazyRouteComponent(() => import('./pages/study/Exports'), 'Exports'),
})

export const trialRoute = createRoute({
  getParentRoute: () => root,
  path: '/studies/$id/trials/$number',
  component: lazyRouteComponent(() => import('./pages/trial/TrialPage'), 'TrialPage'),
})

export const samplesRoute = createRoute({
  getParentRoute: () => root,
  path: '/studies/$id/trials/$number/samples',
  validateSearch: texts('objective', 'split', 'against', 'only'),
  component: lazyRouteComponent(() => import('./pages/trial/Samples'), 'Samples'),
})

export const newStudyRoute = createRoute({
  getParentRoute: () => root,
  path: '/studies/new',
  validateSearch: texts('from', 'recipe', 'finetune', 'example'),
  component: lazyRouteComponent(() => import('./pages/studies/NewStudy'), 'NewStudy'),
})

export const finetunesRoute = createRoute({
  getParentRoute: () => root,
  path: '/finetunes',
  validateSearch: texts('q', 'state', 'sort'),
  component: lazyRouteComponent(() => import('./pages/finetunes/FinetuneList'), 'FinetuneList'),
})

export const newFinetuneRoute = createRoute({
  getParentRoute: () => root,
  path: '/finetunes/new',
  validateSearch: texts('from'),
  component: lazyRouteComponent(() => import('./pages/finetunes/NewFinetune'), 'NewFinetune'),
})

export const finetuneRoute = createRoute({
  getParentRoute: () => root,
  path: '/finetunes/$id',
  validateSearch: texts('against'),
  component: lazyRouteComponent(() => import('./pages/finetunes/FinetunePage'), 'FinetunePage'),
})

export const servedRoute = createRoute({
  getParentRoute: () => root,
  path: '/served/$id',
  validateSearch: texts('trials'),
  component: lazyRouteComponent(() => import('./pages/served/Chat'), 'Chat'),
})

export const loginRoute = createRoute({
  getParentRoute: () => root,
  path: '/login',
  validateSearch: texts('next', 'problem'),
  component: lazyRouteComponent(() => import('./pages/account/Login'), 'Login'),
})

export const settingsRoute = createRoute({
  getParentRoute: () => root,
  path: '/settings',
  component: lazyRouteComponent(() => import('./pages/account/Settings'), 'Settings'),
})

export const usersRoute = createRoute({
  getParentRoute: () => root,
  path: '/admin/users',
  component: lazyRouteComponent(() => import('./pages/admin/Users'), 'Users'),
})

export const queueRoute = createRoute({
  getParentRoute: () => root,
  path: '/queue',
  component: lazyRouteComponent(() => import('./pages/admin/Queue'), 'Queue'),
})

export const teamsRoute = createRoute({
  getParentRoute: () => root,
  path: '/teams',
  component: lazyRouteComponent(() => import('./pages/admin/Teams'), 'Teams'),
})

export const auditRoute = createRoute({
  getParentRoute: () => root,
  path: '/admin/audit',
  validateSearch: texts('user', 'target', 'before'),
  component: lazyRouteComponent(() => import('./pages/admin/Audit'), 'Audit'),
})

export const clusterRoute = createRoute({
  getParentRoute: () => root,
  path: '/admin/cluster',
  component: lazyRouteComponent(() => import('./pages/admin/Cluster'), 'Cluster'),
})

const routeTree = root.addChildren([
  index,
  studiesRoute,
  newStudyRoute,
  studyRoute.addChildren([
    overviewRoute,
    trialsRoute,
    parametersRoute,
    rungsRoute,
    timelineRoute,
    benchmarksRoute,
    compareRoute,
    eventsRoute,
    logRoute,
    fileRoute,
    exportsRoute,
  ]),
  trialRoute,
  samplesRoute,
  finetunesRoute,
  newFinetuneRoute,
  finetuneRoute,
  servedRoute,
  loginRoute,
  settingsRoute,
  queueRoute,
  teamsRoute,
  usersRoute,
  auditRoute,
  clusterRoute,
])

// Texts as they are: the router's own form would read 12 as a number, and write the text 12 in quotation marks.
const parseSearch = (search: string): Texts => Object.fromEntries(new URLSearchParams(search))
const stringifySearch = (search: Texts) => {
  const given = Object.entries(search).flatMap(([name, value]) => (value === undefined ? [] : [[name, `${value}`]]))
  return given.length ? `?${new URLSearchParams(given)}` : ''
}

export const router = createRouter({
  routeTree,
  basepath: BASE || '/',
  defaultPreload: 'intent',
  defaultErrorComponent: Broken,
  parseSearch,
  stringifySearch,
})

declare module '@tanstack/react-router' {
  interface Register {
    router: typeof router
  }
  interface StaticDataRouteOption {
    /** The name of a view within a page, which names the browser's tab with the page. */
    view?: string
  }
}
