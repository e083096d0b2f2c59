"""Ray: joined, started, watched.

- `session`: Ray for the duration of one command
- `local_ray`: a cluster on this machine that outlives the server
- `reconciler`: keeps a driver at work on every study
"""
