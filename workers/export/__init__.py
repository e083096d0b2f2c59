"""Export of a merged model as a Hugging Face checkpoint.

- `checkpoint`: the directory with tensors, configuration, tokenizer and recipe
- `shards`: the files of tensors, whose writing continues after a kill
- `model_card`: the README.md: sources, recipe, scores, licences
"""
