"""JSON documents as typed dictionaries, shared by server, client and commands.

- `files`: the result files of a run, with their JSON Schemas
- `recipe`: recipe.json
- `api`: the server's other responses: studies, events, exports, problems
"""
