"""Connects to Ray or starts it, and keeps studies running on it.

- `session`: Ray for the duration of one command
- `local_ray`: a cluster on this machine that outlives the server
- `reconciler`: keeps a driver running for every unfinished study
"""
