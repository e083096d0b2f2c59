"""Connections to a Ray cluster, and the supervision that keeps a driver running on Ray for each unfinished job.

- `session`: Ray for the duration of one command
- `local_ray`: a Ray cluster on this machine that outlives the server
- `host`: starts, restarts and stops the cluster of `local_ray` for the server
- `dashboard`: the address of Ray's dashboard, and the token that the server sends to it
- `job_client`: Ray's client of jobs, with a limit on how long a request may take
- `node_calls`: calls of functions on a node of the cluster
- `nodes`: the nodes of the cluster, with the use of their resources
- `queue`: chooses which jobs run, and says what the other jobs wait for
- `repeats`: a limit on log messages that are repeated
- `reconciler`: keeps a driver running for every unfinished job
"""
