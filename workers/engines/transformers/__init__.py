"""Plain transformers in float32, a reference independent of vLLM against which scores of engines are checked.

- `backend`: generate completions, read and compare log-probabilities
- `batches`: how many texts are completed at once, and the memory that they take
- `merged_models`: a merge as a transformers model
- `rounding`: tokens whose log-probabilities change much by rounding errors of float32
- `tolerance`: by how much scores of an engine in 16 bits may differ from transformers', measured on the same merge
- `outlines`: tensors of a model by name and shape, from its configuration alone
- `verification`: score an exported checkpoint again and compare with stored samples
"""
