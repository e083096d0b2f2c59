"""Scoring with lm-eval's tasks, filters and metrics, independent of the backend that answers.

- `tasks`: what a task specification names, and the order of its samples
- `inline_files`: the samples of a JSONL file
- `task_loading`: what lm-eval may read while it builds a task
- `prompts`: tokenization, and the requests that a backend answers
- `lm_eval`: ask a backend for a task's samples and compute the metric
"""
