"""Merges without a search: conversion of a recipe or a mergekit configuration to a checkpoint.

- `merge`: one merge: its checks, its plan, the checkpoint
- `series`: all merges of a file, which may be sources of each other
- `documents`: reads the files that describe merges
- `study_file`: the beginning of a study file from a mergekit configuration
- `sources`: the models and vocabularies that mergekit configurations name
"""
