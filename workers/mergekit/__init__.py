"""Conversion between mergekit's configurations and recipes, in both directions.

- `methods`: mergekit's merge methods, with the methods of this project that compute the same tensors
- `config`: mergekit's files as validated documents
- `reader`: reads mergekit's files, and reports errors in them and settings that mergekit would ignore
- `importer`: converts configurations to recipes
- `exporter`: converts recipes to configurations, if mergekit computes the same tensors
"""
