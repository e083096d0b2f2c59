"""Notifications of jobs that have ended, failed or wait too long, by webhooks and e-mail.

- `notifier`: the thread that makes messages from stored changes of jobs, and sends them
- `webhooks`: sends a request to a webhook, and reads a bounded part of the response
- `reachable`: which URLs webhooks may have, and connections to public addresses only
- `mail`: sends a mail to a user
- `documents`: the JSON documents that are sent
- `signatures`: secrets of webhooks, and signatures of requests
- `retries`: the pauses between the tries to send a message
- `settings`: the options of the server about notifications
"""
