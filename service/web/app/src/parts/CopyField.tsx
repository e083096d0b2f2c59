import { Button, Textarea } from '@mantine/core'
import { useRef, useState } from 'react'

/** A text to be copied. Where the browser has no clipboard (it needs HTTPS or localhost), the text is selected. */
export function CopyField({ label, text }: { label: string; text: string }) {
  const field = useRef<HTMLTextAreaElement>(null)
  const [copied, setCopied] = useState<{ text: string; said: string }>()
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(text)
      setCopied({ text, said: 'Copied.' })
    } catch {
      field.current?.select()
      setCopied({ text, said: 'The browser refuses the clipboard. The text is selected: copy it with Ctrl+C or ⌘C.' })
    }
  }
  return (
    <>
      <Textarea
        ref={field}
        label={label}
        wrap="off"
        value={text}
        readOnly
        rows={Math.min(16, text.split('\n').length + 2)}
        styles={{ input: { fontFamily: 'ui-monospace, monospace', fontSize: 12.5 } }}
      />
      <div className="row" style={{ marginTop: 8 }}>
        <Button size="xs" variant="default" onClick={copy}>
          Copy
        </Button>
        <span role="status" className="soft">
          {copied?.text === text && copied.said}
        </span>
      </div>
    </>
  )
}
