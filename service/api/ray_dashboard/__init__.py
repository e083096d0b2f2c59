"""Read-only access to Ray's dashboard, under the logins of this server.

- `paths`: the requests that are forwarded, and the treatment of their answers
- `redaction`: removes secrets and command lines from Ray's answers
- `page`: the policy of the dashboard's page, and the answers that it gets from this server instead of Ray
- `forwarding`: sends requests to Ray, and its answers to the user
"""
