"""The vLLM engine that holds one merge after another. vLLM is imported in this package only.

- `engine`: start vLLM, swap merges, generate, read log-probabilities
- `engine_errors`: which errors end an engine, and why one did not start
- `canary`: compare an engine's log-probabilities with those of transformers, now and then
- `environment`: what a process that starts an engine needs before: environment variables, and llvmlite
- `memory`: divide a machine's memory between engine and source weights
- `worker_extension`: inside vLLM's worker: hold one merge after another, and say which
- `held`: what the model there holds, and how a merge is written over it
- `loading`: where vLLM's loader puts each tensor
- `checksum`: a checksum of all parameters
- `plugin`: vLLM's entry point, which keeps plain weights next to packed ones
- `support`: whether vLLM can run a model, by its configuration
- `capabilities`: the process that asks vLLM for `support`
- `startup`: what an engine is started with
- `paths`: engines whose merges have any number and order of layers
"""
