"""Fine-tunings as jobs: the training of experts, on a server or by `mergesearch finetune`.

- `kind`: the declaration
- `request`: checks of a requested fine-tuning
- `work`: continues a stored fine-tuning to its end
- `training`: the training of an expert or a fleet, each expert in its directory, side by side where there are GPUs
- `ray_train`: the training of one expert on Ray Train
- `directory`: the files of a training's directory
- `events`: events and progress from the histories of running trainings
- `analysis`: the analysis of trained experts, stored as an event
- `study`: the study that merges the experts of a fleet
- `view`: the fields and links that the server shows for a fine-tuning
"""
