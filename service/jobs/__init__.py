"""Jobs (studies, fine-tunings and served studies): their kinds, and the drivers that work on them as Ray Jobs.

- `base`: the declaration of a kind of job, and the data that its drivers receive
- `registry`: the list of all kinds of job
- `driver`: takes over a stored job and runs the function that its kind declares
- `edit`: the labels of a job that users may edit
- `heartbeat`: regular reports that a driver is alive and makes progress
- `resources`: connections to Ray, scoring replicas and Ray Train, for drivers
- `completers`: interfaces of the replicas that complete prompts
- `search`: the kind of job that searches, a study
- `finetune`: the kind of job that trains, a fine-tuning
- `serving`: the kind of job that completes prompts with merges, a served study
"""
