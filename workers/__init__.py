"""Everything that works on models: merging, inference engines, evaluation, training. Nothing imports `service`.

- `types`: plain data between the service and scoring replicas; imports nothing heavy
- `errors`: error classes, each for one reaction of the caller
- `cache`: small results about files, kept between runs
- `file_access`: the files that a study may name when it is sent over HTTP
- `directories`: files and directories that appear under their names only when they are complete
- `telemetry`: log lines that name the job, and trace spans
- `object_store`: objects in S3, Google Cloud Storage and compatible stores, by URL
- `models`: opens, checks and fingerprints checkpoints on disk, on the hub and in object stores
- `merging`: computes merged tensors from a recipe
- `alignments`: HM3's maps between layers of a path: learned, stored, applied, exported
- `evaluation`: tasks, prompts and scores, with lm-eval
- `engines`: vLLM, which computes with merged weights, and transformers, which checks vLLM
- `mergekit`: mergekit's configurations, read and written
- `training`: losses on reference answers, their derivatives with respect to coefficients, and fine-tuning of experts
- `export`: merged models as directories
- `serving`: replicas of engines behind Ray Serve, and a fake one
- `task_pack`: the shipped tasks, as lm-eval YAML files
- `tiny_family`: a base and three experts small enough for tests and the demo
"""
