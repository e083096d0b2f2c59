"""Routes, by topic. They translate between HTTP and the rest, and decide nothing.

- `studies`: create, list, show and cancel studies
- `results`: trials, recipes, front, summary, report and plots of a study
- `events`: the events of a study, as a stream or a list
- `exports`: merged models to download
- `operations`: health, readiness, metrics
"""
