"""Routes of the API by topic. Routes only translate between HTTP and the packages that do the work.

- `jobs`: the routes that every kind of job has: create, list, show, cancel, resume, delete, its log
- `models`: the models that jobs may read
- `events`: the events of one job or of all jobs, as a stream or a list
- `checks`: checks of a study file, without creating a study, and an example of one
- `finetunes`: curves, analysis and report of a fine-tuning, its experts to download
- `trials`: trials of a study, their recipes, and new trials that users request
- `samples`: scored samples of trials, side by side, and their pictures
- `results`: front, summary, held-out data, benchmarks and report of a study
- `plots`: plots of a study and of its trials, as numbers
- `exports`: merged models to download
- `queue`: the jobs that run and wait, and moves of waiting jobs
- `served`: prompts that trials of a study complete, at routes like the routes of OpenAI's API
- `accounts`: users, teams, tokens, the sender's own account, and the audit log
- `notifications`: webhooks and e-mail addresses that are notified of jobs
- `login`: logins of browsers with an identity provider, and their sessions
- `operations`: health, readiness, metrics
- `cluster`: the nodes of the cluster, and the versions of packages
- `ray_dashboard`: Ray's dashboard
"""
