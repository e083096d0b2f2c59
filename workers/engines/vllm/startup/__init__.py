"""Options and sizes with which an engine is started.

- `contents`: the content of an engine, as options and sizes; here one model with the base's layers
- `gpus`: the number of GPUs, their free memory, and what is waited for until it is free
"""
