"""Identification of the users who send requests, by API tokens.

- `tokens`: creates tokens, and their hashes
- `authenticator`: finds the user of a token; its cache is valid for half a second
"""
