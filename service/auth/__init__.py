"""Who sends a request: tokens and sessions, their check, and logins with an identity provider.

- `tokens`: creates tokens, and their hashes
- `sessions`: creates the values of sessions of browsers
- `authenticator`: finds the user of a token or a session, from a cache that forgets within a second
- `settings`: the identity provider, as the options of the server describe it
- `provider`: the identity provider, and what it says about a user
- `logins`: logins of browsers, until a session begins
"""
