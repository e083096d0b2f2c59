"""All checks of a study that are made before an engine starts.

- `examine`: the checks in order
- `result`: the results of the checks, and the plan of the search that follows from them
- `files`: the files that a study may name when it was sent over HTTP
- `models`: models, weights and engine support, and whether a stored study's models are unchanged
- `algorithm`: the choice of a study's searcher
- `recipes`: recipes that a study scores in place of a search, or before it
- `tasks`: tasks, objectives and prompts
- `contamination`: search data that are also in held-out data or benchmarks
- `gradients`: where gradients are computed
- `shared_gpus`: the share of its GPU's memory that an engine leaves to gradients and verification
- `resources`: GPUs and memory
- `dtype`: the dtype of a study's engine
"""
