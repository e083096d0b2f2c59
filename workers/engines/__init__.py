"""Backends that generate and score with merged weights: vLLM, torch for images, and transformers as a reference.

- `vllm`: scores one merge of language models after another in an engine that does not restart
- `images`: scores one merge of image classifiers after another, in torch
- `transformers`: checks the scores of vLLM
- `canaries`: how often engines are compared with transformers
- `source_recipes`: recipes whose merge is a source model itself
- `host_memory`: free host memory
- `rank_threads`: threads for computing on the CPU while an engine's ranks wait
- `kv_cache`: bytes of the attention keys and values of a model
- `logits`: detection of logits that are NaN or infinite
"""
