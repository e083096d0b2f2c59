"""Export of a merged model as a Hugging Face checkpoint.

- `checkpoint`: writes the directory with tensors, configuration, tokenizer and recipe
- `heads`: heads of classifiers, which are exported unchanged
- `shards`: writes the files of tensors, and continues after it was killed
- `quantised`: rounds an exported checkpoint to 4 or 8 bits
- `push`: uploads an exported checkpoint to the hub
- `model_card`: the README.md: sources, recipe, scores, licences
"""
