"""The `mergesearch` command.

- `main`: options, exit codes, error messages
- `verbs`: what each verb does
- `finetune`: the verb that trains experts
- `finetune_tables`: fine-tunings of a server as tables
- `remote`: the verbs that ask a server
- `terminal`: printing JSON or tables
- `tables`: results as tables
- `progress`: live progress of a run
- `export_progress`: progress of an export
"""
