"""Work that the server submits to the cluster as Ray Jobs.

- `search`: the driver of one study
- `progress_log`: its progress in the job's log
"""
