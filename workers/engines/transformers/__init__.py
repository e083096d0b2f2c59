"""Plain transformers in float32 on CPU, independent of vLLM: scores of engines are checked against it.

- `backend`: generate completions, read and compare log-probabilities
- `merged_models`: a merge as a transformers model
- `rounding`: tokens whose log-probabilities rounding errors of float32 move far
- `outlines`: tensors of a model by name and shape, from its configuration alone
- `verification`: score an exported checkpoint again and compare with stored samples
"""
