"""Start options and memory sizes of a vLLM engine.

- `contents`: options and sizes for an engine of one model with the base's layers
- `gpus`: the number of GPUs, and their free memory, for which the start of an engine waits
"""
