"""Alignments of HM3: maps of the residual stream between layers that do not follow each other in one model.

A layer path joins layers of several models, and a layer then receives activations of another distribution than in its
own model. An alignment between the two layers undoes this shift.

What they are:

- `alignment`: the tensors of one alignment, and what it computes
- `files`: alignments as safetensors files that are named by their digests
- `recipes`: which layers of a recipe have an alignment before them

How they are learned:

- `samples`: which search samples are read, and their prompts
- `activations`: what each layer of a model receives while it reads these prompts
- `fitting`: the map from one layer's activations to another's, by moments or a light network
- `pairs`: the alignment of a pair of layers, learned once and kept in the cache

How merges with them are computed and exported:

- `hooks`: alignments before the layers of a transformers model
- `export`: the tensors, configuration and model class that the checkpoint of such a merge has
- `modeling_aligned`: the model class itself, which is copied to the checkpoint

Two parts are elsewhere because of what they import. `workers.engines.vllm.paths` computes paths with alignments in
vLLM. `service.tune.proposing.alignments` learns all pairs of a study in Ray tasks and keeps the study's own copies.
"""
