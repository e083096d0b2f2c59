"""Export of a merged model as a Hugging Face checkpoint.

- `checkpoint`: writes the directory with tensors, configuration, tokenizer and recipe
- `heads`: heads of classifiers, which are exported unchanged
- `shards`: writes the files of tensors, and continues after it was killed
- `model_card`: the README.md: sources, recipe, scores, licences
"""
