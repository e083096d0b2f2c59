"""Identification of the users who send requests, by API tokens, and by sessions of browsers.

- `tokens`: creates tokens, and their hashes
- `sessions`: creates the values of sessions of browsers
- `authenticator`: finds the user of a token or a session; its cache is valid for half a second
- `settings`: the identity provider, as the options of the server describe it
- `provider`: the identity provider, and what it says about a user
- `logins`: logins of browsers, until a session begins
"""
