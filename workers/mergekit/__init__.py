"""mergekit's configurations: read as recipes, and recipes written as configurations.

- `methods`: mergekit's merge methods, with the declared methods that are their counterparts
- `config`: mergekit's files as validated documents
- `reader`: reads mergekit's files, and reports errors in them and settings that mergekit would ignore
- `importer`: configurations as recipes
- `exporter`: recipes as configurations, if mergekit computes the same tensors
"""
