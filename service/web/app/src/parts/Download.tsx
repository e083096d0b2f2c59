import { Button } from '@mantine/core'

/** Saves a text as a file. */
export function Download(props: { text: string; name: string; type?: string; children?: string }) {
  const { text, name, type = 'text/plain', children = 'Download' } = props
  const save = () => {
    const link = document.createElement('a')
    link.href = URL.createObjectURL(new Blob([text], { type }))
    link.download = name
    link.click()
    URL.revokeObjectURL(link.href)
  }
  return (
    <Button variant="default" size="xs" onClick={save}>
      {children}
    </Button>
  )
}
