"""Alignments of HM3: maps of the residual stream between layers of different models in one merged model.

In a layer path, a layer may follow a layer of another model. The distribution of its inputs then differs from their
distribution in its own model. An alignment between the two layers corrects this shift.

Alignments and their files:

- `alignment`: the tensors of one alignment, and the function that they define
- `files`: alignments as safetensors files that are named by their digests
- `recipes`: the alignments before the layers of a recipe

Learning of alignments:

- `samples`: the search samples from which alignments are learned, and their prompts
- `activations`: the inputs of each layer of a model for these prompts
- `fitting`: the map from one layer's activations to another's, by moments or a light network
- `pairs`: the alignment of a pair of layers, learned once and kept in the cache

Computation and export of merges with alignments:

- `hooks`: alignments before the layers of a transformers model
- `export`: the tensors, configuration and model class in the checkpoint of a merge with alignments
- `modeling_aligned`: the model class itself, which is copied to the checkpoint

Two parts are in other packages, because they import vLLM or Ray. The package `workers.engines.vllm.paths` computes
paths with alignments in vLLM. The module `service.tune.proposing.alignments` learns the alignments of a study in Ray
tasks, and keeps the study's own copies.
"""
