"""Limits on the origin and number of requests, on simultaneous checks, and on the disk space of results.

- `origin`: refuses requests for another server, or from a web page of another server
- `csrf`: refuses requests of sessions that pages of other servers may have sent
- `rates`: limits the number of requests of each token, session and address
- `headers`: security headers of responses
- `fair_queue`: lets a limited number of requests run at a time, and clients take turns
- `artifacts`: the quota of experts and policies
- `exports`: which exports have expired or exceed the quota
"""
