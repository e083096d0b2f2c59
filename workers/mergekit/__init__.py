"""mergekit's configurations: read as recipes, and recipes written as configurations.

- `methods`: its merge methods, as the declared methods that are their counterparts
- `config`: its files as validated documents
- `importer`: configurations as recipes
- `exporter`: recipes as configurations, where mergekit computes the same tensors
"""
