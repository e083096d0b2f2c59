"""Optimizers for experts that are to be merged: MergOPT, and the optimizers that it is compared with.

Paper: "MergOPT: A merge-aware optimizer for robust model merging". All optimizers are subclasses of
`torch.optim.Optimizer` with `step(closure)`.

- `optimizer`: MergOPT wraps an optimizer; it computes gradients at the parameters plus an offset that simulates a merge
- `noise`: the distributions of the offset; its element i at step s is a function of the seed, s and i
- `task_vectors`: offsets made of the task vectors of experts, in place of noise
- `kernel`: the noise, added by compiled code on CPU
- `cuda_kernel`: the noise, added by one kernel for each tensor on a CUDA device
- `elements`: the indices of a parameter's elements, or of a rank's shard, among all elements
- `in_layers`: offsets added where layers read their weights, and recomputed in the backward pass
- `fit`: the scale of the noise from existing task vectors, and how well the noise fits them
- `wrapper`: base class of optimizers that wrap another optimizer
- `sharpness`: SAM and ASAM
- `tangent`: fine-tuning in the tangent space of the base, for small models
"""
