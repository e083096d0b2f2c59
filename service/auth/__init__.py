"""Who sends a request: tokens, and their check.

- `tokens`: creates tokens, and their hashes
- `authenticator`: finds the user of a token, from a cache that forgets within a second
"""
