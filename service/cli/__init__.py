"""The `mergesearch` command.

- `main`: options, exit codes, error messages
- `verbs`: what each verb does
- `finetune`: the verb that trains experts
- `finetune_tables`: fine-tunings of a server as tables
- `remote`: the verbs that send requests to a server
- `job_views`: views of a server's jobs, for each kind
- `terminal`: output as JSON or tables
- `tables`: results as tables
- `progress`: live progress of a run
- `export_progress`: progress of an export
"""
