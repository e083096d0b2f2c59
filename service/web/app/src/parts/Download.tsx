import { Button } from '@mantine/core'

/** Saves a text as a file. */
export function save(text: string, name: string, type: string) {
  const link = document.createElement('a')
  link.href = URL.createObjectURL(new Blob([text], { type }))
  link.download = name
  link.click()
  URL.revokeObjectURL(link.href)
}

/** A button that saves a text as a file. */
export function Download(props: { text: string; name: string; type?: string; children?: string }) {
  const { text, name, type = 'text/plain', children = 'Download' } = props
  return (
    <Button variant="default" size="xs" onClick={() => save(text, name, type)}>
      {children}
    </Button>
  )
}
