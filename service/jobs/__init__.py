"""Work that the server submits to the cluster as Ray Jobs.

- `driver`: takes a stored study over and does what its kind says
- `search`: the search of one study
- `finetune`: the training of one expert or a fleet, on Ray Train
- `training_events`: its numbers as events and progress
- `training_analysis`: what the trained experts are like, as an event
- `training_study`: the study that merges a fleet's experts
- `progress_log`: its progress in the job's log
"""
