"""Routes, by topic. They only translate between HTTP and the packages that do the work.

- `studies`: create, list and show studies
- `finetunes`: create, list and show fine-tunings, download their experts
- `jobs`: what both have: how they are created, cancelled, resumed and deleted, their log
- `results`: trials, recipes, front, summary, report and plots of a study
- `events`: the events of a study or fine-tuning, as a stream or a list
- `exports`: merged models to download
- `operations`: health, readiness, metrics
"""
