"""Merging: from a recipe and the source models to the merged model's tensors.

From the top; each module imports only modules below it:

- `materialize`: the merged model of a recipe, as one stream of tensors.
- `bank`: the source weights of a family, held once, with the statistics computed from them.
- `precompile`: compiles the kernels that merges usually need, at install.
- `statistics`: what depends on the sources alone, computed by the kernels.
- `kernels`: fused kernels for CPU (Numba) and CUDA (Triton), bit for bit the plain methods.
- `methods`: the merge methods in plain torch, the reference for the kernels.
- `merged_tensor`: one tensor to merge, and the stacks of experts.
- `residual_scales`: scales of layers, folded into weights.
- `recent`: how much of the statistics of several sources is kept.
- `order_statistics`: the order of a tensor's elements by magnitude, and tables that narrow any rank to a few elements.
- `masks`: counter-based random masks.
"""
