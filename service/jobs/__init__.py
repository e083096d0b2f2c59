"""Work that the server submits to the cluster as Ray Jobs.

- `driver`: takes a stored study over and does what its kind says
- `search`: the search of one study
- `finetune`: the training of one expert, on Ray Train
- `progress_log`: its progress in the job's log
"""
