"""Everything about a study that can be checked before an engine starts.

- `examine`: the checks in order
- `result`: what they found, and the plan of the search that follows from it
- `files`: which files a study may name, when it was sent over HTTP
- `models`: models, weights and engine support; that a study's models are unchanged
- `algorithm`: which searcher a study has
- `tasks`: tasks, objectives and prompts
- `resources`: GPUs and memory
- `dtype`: the dtype of a study's engine
- `durations`: how long a study will take
"""
