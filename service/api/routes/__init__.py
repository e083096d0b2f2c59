"""Routes of the API by topic. Routes only translate between HTTP and the packages that do the work.

- `jobs`: the routes that every kind of job has: create, list, show, cancel, resume, delete, its log
- `events`: the events of a job, as a stream or a list
- `finetunes`: curves, analysis and report of a fine-tuning, its experts to download
- `results`: trials, recipes, front, summary, report and plots of a study
- `exports`: merged models to download
- `accounts`: users, teams, tokens, the sender's own account, and the audit log
- `login`: logins of browsers with an identity provider, and their sessions
- `operations`: health, readiness, metrics
"""
