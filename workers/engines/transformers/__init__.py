"""Plain transformers in float32 on CPU, independent of vLLM: the reference that scores are checked against.

- `backend`: complete texts and read log-probabilities
- `verification`: score an exported checkpoint again and compare with stored samples
"""
