"""The `mergesearch` command.

- `main`: options, exit codes, error messages
- `verbs`: the function of each verb (subcommand)
- `finetune`: the verb that trains experts
- `finetune_tables`: fine-tunings of a server as tables
- `finetune_texts`: losses and values of a training as text
- `accounts`: the verbs of users, teams and tokens
- `notifications`: the commands `webhooks` and `mail`
- `remote`: the verbs that send requests to a server
- `chat`: the verb that completes prompts with trials of a study
- `job_views`: displays of a server's jobs, one for each kind of job
- `terminal`: output as JSON or tables
- `trial_files`: files and Optuna storages with the trials of a study
- `tables`: results as tables
- `tasks`: the verbs of shipped tasks and their data
- `plan`: the verb that plans a study for machines of a profile
- `progress`: live progress of a run
- `export_progress`: progress of an export
"""
