"""Connects to Ray or starts it, and keeps jobs running on it.

- `session`: Ray for the duration of one command
- `local_ray`: a cluster on this machine that outlives the server
- `host`: starts, restarts and stops the cluster that the server runs itself
- `reconciler`: keeps a driver running for every unfinished job
"""
