"""Limits on requests: where they come from, how many are checked at once, how much disk their results take.

- `origin`: refuses requests that are meant for, or come from, other servers
- `fair_queue`: shares a limited number of concurrent turns between clients
- `artifacts`: the quota of experts and policies
- `exports`: which exports have expired or exceed the quota
"""
