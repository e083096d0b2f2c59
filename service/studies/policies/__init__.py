"""Uses of trained layer-path policies beyond their own study.

- `stored`: the policies that a study has learned
- `paths`: layer paths that the policies propose for other preferences and models
- `start`: studies that begin with the policies of another study
"""
