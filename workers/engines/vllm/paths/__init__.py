"""The path engine: a vLLM engine for merges of any depth and order of layers, without a restart.

The model in vLLM is a pool of more layers than any merge has, with keys and values for the longest merge. A merge is a
path of hops. Each hop names a layer of the pool, factors and an alignment. Layers that are in the pool already, for
example the sources' layers, are not written again: for another path of known layers, only the list of hops changes.

- `contents`: vLLM's options, sizes and the merges that fit, for the engine's process
- `geometry`: whether the layers of several models can be combined in one path
- `sizes`: the number of layers in the pool
- `model`: the model in vLLM that computes a path
- `pool`: a record of the content of each layer of the pool
- `held`: inside vLLM's worker: write layers, set the path
"""
