"""Search spaces: what a configuration means, as a recipe.

- `base`: `SearchSpace`, the interface of every search space
- `lfs`: LFS, one method per group of layers and its coefficients per component group
- `lfs_methods`: the methods that LFS was published with, as it searches them
- `lfs_ranges`: all other declared methods, searched in the ranges that they declare
"""
