"""The command line, the HTTP server, and the drivers of jobs.

Packages, of which each imports only packages below it and the modules:

- `cli`: commands and what they print
- `api`: the HTTP API
- `web`: the web page over the HTTP API
- `client`: Python client of the HTTP API
- `retention`: removes data of ended jobs by age and size
- `notifications`: tells users by webhooks and e-mail that jobs have ended or wait
- `jobs`: the kinds of job, their requests and drivers
- `merges`: merges without a search
- `studies`: what happens before and after a search: checks, exports, and studies that start from results of other jobs
- `tune`: the search, on Ray Tune
- `results`: statistics, result files and the report
- `cluster`: connections to Ray, and the thread that keeps a driver running for every job
- `auth`: identification of the users who send requests, by API tokens
- `schemas`: the shapes of result files and of the API's documents
- `store`: jobs and their results in SQL

Modules:

- `server`: the process of the serve command, which imports all packages
- `resolved_study`: the stored models, tasks, rungs and objectives of an accepted study file
- `engine_machines`: the machines on which engines run, as an installation declares them
- `worker_process`: a separate process for heavy or risky calls
- `threads`: threads of the server, by kind of work
- `open_files`: the limit on open files of the server
- `disk`: locks on directories, and room on disks
- `types`: records and enums
- `errors`: exceptions
"""
