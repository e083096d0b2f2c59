"""Plain transformers in float32 on CPU, independent of vLLM: the reference that scores are checked against.

- `backend`: generate completions, read and compare log-probabilities
- `merged_models`: a merge as a transformers model
- `verification`: score an exported checkpoint again and compare with stored samples
"""
