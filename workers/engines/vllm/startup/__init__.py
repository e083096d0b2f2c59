"""What an engine is started with.

- `contents`: what an engine holds, as options and sizes; here one model of the base's shape
- `gpus`: how many GPUs there are and how much of their memory is free
"""
