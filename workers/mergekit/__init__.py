"""mergekit's configurations: read as recipes, and recipes written as configurations.

- `methods`: its merge methods, as the declared methods that are their counterparts
- `config`: its files as validated documents
- `reader`: reading of its files: reports what is wrong in them, and what mergekit would ignore
- `importer`: configurations as recipes
- `exporter`: recipes as configurations, where mergekit computes the same tensors
"""
