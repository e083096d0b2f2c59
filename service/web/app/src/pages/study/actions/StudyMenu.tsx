import { Button, Menu } from '@mantine/core'
import { useQuery } from '@tanstack/react-query'
import { useNavigate } from '@tanstack/react-router'
import { useRef, useState } from 'react'
import { isFinished } from '../../../api/jobs'
import { session as sessionQuery } from '../../../api/queries'
import { may, maySubmit } from '../../../api/rights'
import type { Study } from '../../../api/types'
import { DeleteDialog } from './DeleteDialog'
import { EditDialog } from './EditDialog'
import { ShareDialog } from './ShareDialog'
import { VerbDialog } from './VerbDialog'
import { VERBS, type Verb } from '../../../api/verbs'

type Dialog = Verb['name'] | 'edit' | 'share' | 'delete'

/** What the user may do with a study in its present state; nothing for a user who may only read it. */
export function StudyMenu({ study, isSmall }: { study: Study; isSmall?: boolean }) {
  const session = useQuery(sessionQuery)
  const navigate = useNavigate()
  const [dialog, setDialog] = useState<Dialog>()
  const target = useRef<HTMLButtonElement>(null)
  // A dialog gives the focus back to what had it before: an item of the menu, which is gone.
  const close = () => {
    setDialog(undefined)
    target.current?.focus()
  }
  if (!maySubmit(session.data)) return null
  const isOwn = may(session.data, study, 'change')
  const verb = VERBS.find(({ name }) => name === dialog)
  return (
    <>
      <Menu position="bottom-end" withinPortal transitionProps={{ duration: 0 }}>
        <Menu.Target>
          <Button
            ref={target}
            variant={isSmall ? 'subtle' : 'default'}
            size={isSmall ? 'compact-xs' : 'xs'}
            aria-label={`Actions on ${study.name}`}
          >
            {isSmall ? '⋯' : 'Actions'}
          </Button>
        </Menu.Target>
        <Menu.Dropdown>
          {isOwn &&
            VERBS.filter(({ isPermitted }) => isPermitted(study)).map(({ name }) => (
              <Menu.Item key={name} onClick={() => setDialog(name)}>
                {capital(name)}
              </Menu.Item>
            ))}
          {isOwn && <Menu.Item onClick={() => setDialog('edit')}>Edit</Menu.Item>}
          <Menu.Item onClick={() => navigate({ to: '/studies/new', search: { from: study.id } })}>Clone</Menu.Item>
          {isOwn && session.data?.user && <Menu.Item onClick={() => setDialog('share')}>Share</Menu.Item>}
          {isOwn && isFinished(study) && <Menu.Item onClick={() => setDialog('delete')}>Delete</Menu.Item>}
        </Menu.Dropdown>
      </Menu>
      {verb && <VerbDialog study={study} verb={verb} onClose={close} />}
      {dialog === 'edit' && <EditDialog study={study} onClose={close} />}
      {dialog === 'share' && session.data && <ShareDialog study={study} session={session.data} onClose={close} />}
      {dialog === 'delete' && <DeleteDialog study={study} onClose={close} />}
    </>
  )
}

const capital = (word: string) => word[0]!.toUpperCase() + word.slice(1)
