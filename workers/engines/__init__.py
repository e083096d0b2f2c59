"""Engines, which compute with merged weights.

- `vllm`: scores merges, one after another, in an engine that never restarts
- `transformers`: checks what vLLM scored
"""
