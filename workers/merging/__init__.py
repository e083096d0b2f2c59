"""Merging: computation of the merged model's tensors from a recipe and the source models.

Each module imports only modules below it:

- `materialize`: computes the merged model of a recipe, one tensor after another.
- `devices`: the device that computes each merged tensor, by the memory that its method takes.
- `plan`: the merged model's tensors with their merges, from a recipe that is checked against a bank.
- `bank`: the source weights of a family, held once, with the statistics computed from them.
- `precompile`: compiles the kernels that most merges need, at installation.
- `statistics`: statistics that depend on the sources alone, computed by the kernels.
- `whole_models`: statistics of whole task vectors: thresholds over all tensors of a model, and the majority sign.
- `kernels`: fused kernels for CPU (Numba) and CUDA (Triton), which give the bits of the plain methods.
- `methods`: the merge methods in plain torch, which define the results of the kernels.
- `merged_tensor`: one tensor to merge, and the stacks of experts.
- `residual_scales`: scales of layers and of their MLPs, folded into weights.
- `node`: values and memory that the processes of one machine share.
- `shards`: the elements of a tensor that one rank of an engine holds.
- `recent`: a cache for statistics of several sources.
- `order_statistics`: the order of elements by magnitude, and tables in which the element of any rank is found quickly.
- `masks`: counter-based random masks.
"""
