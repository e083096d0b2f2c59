"""Export of a merge as a Hugging Face checkpoint.

- `checkpoint`: tensors, configuration and tokenizer, continued after a kill
- `model_card`: the README.md: sources, recipe, scores, licences
"""
