"""Scoring replicas: warm engines behind Ray Serve. Only this package of `workers` imports Ray Serve.

- `deployment`: start the replicas of a family, and the handle that studies score with
- `replica`: the work of one replica: swap, score, describe tasks, verify, metrics
- `recipe_lock`: the order in which a replica takes its chunks
- `watchdog`: how long a replica's work may take
- `current_chunk`: the chunk that a replica was scoring when it died
- `fatal_errors`: the signal that ended a replica's process
- `fake`: a scorer without models, for tests and dry runs of the search
"""
