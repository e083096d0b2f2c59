"""The command line, the HTTP server, and the drivers of studies.

A package imports only packages listed below it, and the modules at the end of the list.

- `cli`: commands and what they print
- `server`: the process of the serve command
- `api`: the HTTP API
- `jobs`: entry points of the Ray Jobs on the cluster
- `studies`: a study from its file to its end: checks, attempts, exports
- `tune`: the search, on Ray Tune
- `results`: statistics, result files and the report
- `cluster`: Ray, and one driver for every study on it
- `client`: the HTTP API from Python
- `schemas`: the shapes of result files and of the API's documents
- `store`: studies in SQL
- `disk`: locks on directories, and room on disks
- `types`: records and enums
- `errors`: exceptions
"""
