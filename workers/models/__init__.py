"""Models for merging: checkpoints that are located, checked and fingerprinted, with aligned vocabularies.

- `family`: `ResolvedFamily`: a base and its experts, located, opened and checked once
- `checkpoints`: one checkpoint: its configuration, its tensors by name
- `headers`: safetensors headers, checked against their files
- `adapters`: LoRA adapters as models
- `computed_tensors`: tensors computed from stored ones, such as weights changed by LoRA or rows in another order
- `components`: the layer and component of each tensor
- `config`: config.json with the key names that all model types share
- `modalities`: declarations of the modalities, text and images: all properties that only models of one modality have
- `task_heads`: classification heads of image classifiers, each for one task
- `zero_shot`: zero-shot heads of CLIP, which its text tower computes from the names of any classes
- `image_processors`: image processors, which convert image files to a model's input
- `vocabulary`: rows of embeddings, aligned to one vocabulary
- `compatibility`: reasons why models cannot be merged with each other
- `fingerprints`: hashes of contents; NaN and infinity in weights
- `tokenizers`: tokenizers that agree with their tokenizer.json
- `chat_templates`: chat templates of models, and published chat formats by name
- `merged_files`: configuration and tokenizer of a merged model
- `listing`: models in the directories that a study may read
- `remote`: models on the Hugging Face hub and in object stores
"""
