"""What trained policies of layer paths are used for beyond their own study.

- `stored`: the policies that a study has learned
- `paths`: paths that they propose for other preferences and models
- `start`: a study that begins with the policies of another one
"""
