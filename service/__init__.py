"""Commands, the HTTP server, and what drives a study.

A package imports only those below it, modules stand at the bottom.

- `cli`: commands and what they print
- `server`: the process of the serve command
- `api`: the HTTP API
- `jobs`: work on the cluster: one Ray Job each
- `studies`: a study from its file to its end: checks, attempts, exports
- `tune`: the search, on Ray Tune
- `results`: statistics, result files and the report
- `cluster`: Ray, and a driver at work on every study
- `client`: the HTTP API from Python
- `schemas`: the shapes of result files and of the API's documents
- `store`: studies in SQL
- `disk`: locks on directories, and room on disks
- `types`: records and enums
- `errors`: exceptions
"""
