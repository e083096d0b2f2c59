"""mergekit's configurations: read as recipes, and recipes written as configurations.

- `methods`: its merge methods, as the declared methods that are their counterparts
- `config`: its files as validated documents
- `reader`: reading them: what is wrong in a file, and what mergekit would pass over
- `importer`: configurations as recipes
- `exporter`: recipes as configurations, where mergekit computes the same tensors
"""
