"""Reuse of trained layer-path policies outside the study that trained them.

- `stored`: the policies that a study has learned
- `paths`: layer paths that the policies propose for other preferences and models
- `start`: studies whose policies are initialised with the policies of another study
"""
