"""The vLLM engine, whose weights are replaced in place by one merge after another. Only this package imports vLLM.

- `engine`: start vLLM, swap merges, generate, read log-probabilities
- `checkpoint_engine`: vLLM engine for one checkpoint, which may be quantised, without merges
- `readings`: the prompts that an engine reads for the log-probabilities of continuations
- `engine_errors`: errors that end an engine, and the reason why an engine did not start
- `canary`: regular comparison of an engine's log-probabilities with those of transformers
- `environment`: environment variables, and a fix for llvmlite, for a process that starts an engine
- `memory`: divide a machine's memory between engine and source weights
- `worker_extension`: code in vLLM's worker process that writes merges and reports which merge is held
- `held`: the weights of the model in vLLM's worker, with methods that write merges over them
- `loading`: finds where vLLM's loader writes each tensor
- `checksum`: a checksum of all parameters
- `plugin`: vLLM's entry point, which keeps plain weights next to packed ones
- `support`: whether vLLM can run a model, according to its configuration
- `capabilities`: the process that asks vLLM which models it can run, for `support`
- `startup`: options and memory sizes with which an engine is started
- `paths`: engines whose merges have any number and order of layers
"""
