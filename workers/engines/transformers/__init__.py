"""Plain transformers in float32 on CPU, independent of vLLM: scores of engines are checked against it.

- `backend`: generate completions, read and compare log-probabilities
- `merged_models`: a merge as a transformers model
- `verification`: score an exported checkpoint again and compare with stored samples
"""
