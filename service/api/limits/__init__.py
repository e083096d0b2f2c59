"""What requests may do: where they come from, how many run at once, how long their exports are kept.

- `origin`: refuses requests that are meant for, or come from, other servers
- `fair_queue`: a few places to work, shared between clients
- `artifacts`: how much room experts and policies may take
- `exports`: which exports have expired or must make room
"""
