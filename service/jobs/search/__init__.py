"""Studies as jobs: from a study file to the results, on a server or by `mergesearch run`.

- `kind`: declaration of the kind of job
- `request`: checks of a requested study
- `edit`: options that may change while the study runs
- `prepare`: checks a study file and resolves it to a study that can run
- `work`: continues a stored study to its end
- `attempt`: one attempt: alignments, search, held-out stage, verification
- `starts`: messages about the phases in which engines start
- `verification`: some trials scored again by plain transformers
- `local_run`: a study in a directory, without a server
- `checks`: checks of a study file for the server, without creating a study
- `dry_run`: the expected cost of a study, without running it
- `plan_document`: the plan of a study as a JSON document
- `progress`: snapshots of a study's progress
- `progress_log`: progress as lines of a log
"""
