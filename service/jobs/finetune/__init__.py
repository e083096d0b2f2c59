"""Fine-tunings as jobs: the training of experts, on a server or by `mergesearch finetune`.

- `kind`: declaration of the kind of job
- `request`: checks of a requested fine-tuning
- `work`: continues a stored fine-tuning to its end
- `training`: trains one expert or a fleet of experts, each in its directory, several at a time if there are GPUs
- `ray_train`: the training of one expert on Ray Train
- `gpu_memory`: the check that a training fits into the memory of its GPUs
- `directory`: the files of a training's directory
- `earlier_versions`: defaults of earlier versions, which their trainings keep
- `events`: events and progress from the histories of running trainings
- `analysis`: the analysis of trained experts, stored as an event
- `study`: the study that merges the experts of a fleet
- `view`: the fields and links that the server shows for a fine-tuning
"""
