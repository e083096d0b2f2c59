"""Writing a merge as a Hugging Face checkpoint.

- `checkpoint`: tensors, configuration and tokenizer, resumed after a kill
- `model_card`: the README.md: sources, recipe, scores, licences
"""
