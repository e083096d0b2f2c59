"""Reuse of trained policies outside the study that trained them.

A policy is a network that builds layer paths, the sequences of source models' layers of which merges consist.

- `stored`: the policies that a study has learned
- `paths`: layer paths that the policies propose for other preferences and models
- `start`: studies whose policies are initialised with the policies of another study
"""
