"""Routes, by topic. They only translate between HTTP and the packages that do the work.

- `studies`: create, list, show, cancel and resume studies
- `results`: trials, recipes, front, summary, report and plots of a study
- `events`: the events of a study, as a stream or a list
- `exports`: merged models to download
- `operations`: health, readiness, metrics
"""
