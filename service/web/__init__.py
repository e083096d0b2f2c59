"""The web page: a single-page application over the HTTP API.

- `pages`: serves the built page
- `app/`: its sources, in TypeScript; `make web` writes the built files to `static/`, which is not in version control
"""
