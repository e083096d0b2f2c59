"""Writing a merge as a Hugging Face checkpoint.

- `checkpoint`: tensors, configuration and tokenizer, resumed after a kill
- `aligned`: what the checkpoint of a merge with alignments has beside
- `modeling_aligned`: the model class that such a checkpoint brings along
- `model_card`: the README.md: sources, recipe, scores, licences
"""
