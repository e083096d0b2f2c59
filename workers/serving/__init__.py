"""Scoring replicas: warm engines behind Ray Serve. The only package of `workers` that imports Ray Serve.

- `deployment`: start the replicas of a family, and the handle that studies score with
- `replica`: what one replica does: swap, score, describe tasks, verify, metrics
- `recipe_lock`: the order in which a replica takes its chunks
- `watchdog`: how long a replica's work may take
- `current_chunk`: which chunk a replica that has died was scoring
- `fatal_errors`: which signal ended a replica's process
- `fake`: a scorer without models, for tests and dry runs of the search
"""
