"""Scoring with lm-eval's tasks, filters and metrics, independent of the backend that answers.

- `tasks`: the task of a specification, and the order of its samples
- `inline_files`: the samples of a JSONL file
- `task_loading`: what lm-eval may read while it builds a task
- `prompts`: tokenization, and the requests that a backend answers
- `metrics`: lm-eval's filters and metrics, applied to answers
- `metric_process`: metrics in a separate process, because metrics that set timers need a main thread
- `references`: the right answers of a task's samples, as tokens to read
- `lengths`: how many tokens a task's samples have
- `lm_eval`: score a task's samples: ask a backend, compute the values
"""
