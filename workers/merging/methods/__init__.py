"""Merge methods in plain PyTorch: pure functions from tensors to a tensor, each with its equation.

The functions define the results of merging. All arithmetic is in float32 on the tensors given, element by element in
the order of the sources, without fused multiply-add. Reductions over a tensor are summed in fixed blocks. Therefore the
same operands give the same bits with any number of threads (except WUDI's matrix products). Coefficients that are
tensors without dimensions get gradients, at fixed masks, if the method's declaration says so. Each method is declared
in the package `search_spaces.methods` and has one function here, registered by `@merges(NAME)`. Import names from their
modules.

- `registry`: the decorator that registers a function
- `peaks`: the memory that each function takes
- `plain`: `PLAIN`, the methods with their functions, and the `Operands` they are called with
- `averages`: averages and interpolations of whole models
- `fusions`: fusions of two models, element by element
- `spherical`: means on a sphere of several models
- `task_vectors`: sums of task vectors, sparsified or with elected signs
- `trimming`: task vectors without their smallest elements, or without their smallest and largest elements
- `competition`: task vectors that compete for each element
- `arithmetic`: weighted sums, inner products, angles and ranks
- `scalars`: arithmetic on coefficients, with a gradient if they are tensors
- `sparsify`: functions that drop elements of a task vector
- `consensus`: functions that elect signs, as in TIES
- `table`: the declarations as the table in README.md
"""
