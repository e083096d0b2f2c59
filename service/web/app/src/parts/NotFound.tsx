import { Link } from '@tanstack/react-router'
import { Page } from './Page'

export function NotFound() {
  return (
    <Page title="No such page">
      <p>
        This address has no view. <Link to="/studies">The list of studies</Link>
      </p>
    </Page>
  )
}
