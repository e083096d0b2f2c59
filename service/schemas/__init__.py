"""The shapes of JSON documents, as typed dictionaries that server, client and commands share.

- `files`: the files that a run leaves, with their JSON Schemas
- `api`: the server's other responses: studies, events, exports, problems
"""
