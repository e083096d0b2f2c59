"""Work that the server gives to the cluster; each module is run by one Ray Job.

- `search`: the driver of one study
- `progress_log`: its progress in the job's log
"""
