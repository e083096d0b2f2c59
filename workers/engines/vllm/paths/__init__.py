"""The path engine: merges of any depth and order of layers in an engine that does not restart.

The model in vLLM is a pool of layers, more than any merge has, with keys and values for as many layers as the longest
merge may have. A merge is a path: for each position a layer of the pool and a factor. Layers that are in the pool
already, sources' layers above all, are not written again, so that another path is another list.

- `contents`: what the engine's process has to know: vLLM's options, sizes, which merges fit
- `geometry`: which models' layers can follow each other
- `sizes`: how many layers the pool has
- `model`: the model in vLLM that walks a path
- `pool`: which layer of the pool holds what
- `held`: inside vLLM's worker: write layers, set the path
"""
