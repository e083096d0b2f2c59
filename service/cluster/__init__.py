"""Connects to Ray or starts it, and keeps studies running on it.

- `session`: Ray for the duration of one command
- `local_ray`: a cluster on this machine that outlives the server
- `host`: the server's own such cluster: started, restarted and stopped
- `reconciler`: keeps a driver running for every unfinished study
"""
