"""Limits on requests: their origin, how many are checked at once, how much room their results take.

- `origin`: refuses requests that are meant for, or come from, other servers
- `fair_queue`: turns at a few places to work, shared between clients
- `artifacts`: the quota of experts and policies
- `exports`: which exports have expired or must make room
"""
