"""Scoring replicas: warm engines behind Ray Serve. No other package of `workers` imports Ray Serve.

- `deployment`: start the replicas of a family
- `serve_scorer`: the handle through which studies score
- `completions`: requests for completions, their parts, and the batch in which an engine generates them
- `completion_prompts`: tokenization of the prompts of requests for completions
- `gpu_shares`: a GPU that an engine shares with an actor for gradients or verification
- `gpu_verification`: verification in a process with free GPUs
- `serve_completer`: the handle through which prompts are completed
- `application`: the state of the Serve application that runs the replicas
- `replica`: the class that Serve runs: one worker, with its lock, health checks and metrics
- `cores`: the cores of its machine that a replica's engine uses
- `engine_worker`: the worker of a replica with vLLM: swap, score, describe tasks, verify
- `image_worker`: the worker of a replica for image classifiers, in torch
- `recipe_lock`: the order in which a replica scores its chunks
- `watchdog`: time limits for a replica's work
- `current_chunk`: the samples (chunk) that a replica was scoring when it died
- `start_phases`: records of the phases of each replica's start, such as a download
- `draining`: whether Ray drains a replica's node, because the node is about to stop
- `process_logs`: the log files of a replica's process
- `fatal_errors`: the signal that ended a replica's process
- `fake`: a scorer without models, for tests and dry runs of the search
"""
