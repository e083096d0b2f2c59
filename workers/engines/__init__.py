"""Engines, which compute with merged weights.

- `vllm`: scores merges, one after another, in an engine that never restarts
- `transformers`: checks what vLLM scored
- `host_memory`: host memory that is free now
- `logits`: logits that no score can come from
"""
