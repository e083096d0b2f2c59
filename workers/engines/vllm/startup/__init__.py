"""Start options and memory sizes of a vLLM engine.

- `contents`: options and sizes for an engine whose merges have as many layers as the base model
- `cpus`: options for engines on CPU: cache and blocks of keys and values
- `gpus`: the number of GPUs, and their free memory, for which the start of an engine waits
"""
