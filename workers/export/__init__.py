"""Export of a merged model as a Hugging Face checkpoint.

- `checkpoint`: writes the directory with tensors, configuration, tokenizer and recipe
- `expansion`: expands models of different widths, depths and kinds to one form, for layer paths
- `heads`: unmerged parts of image models: classification heads, and the text tower of CLIP
- `shards`: writes the files of tensors, and continues an export that was killed
- `quantised`: rounds an exported checkpoint to 4 or 8 bits
- `push`: uploads an exported checkpoint to the hub
- `model_card`: the README.md: sources, recipe, scores, licences
"""
