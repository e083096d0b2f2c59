"""Scoring with lm-eval's tasks, filters and metrics, independent of the backend that answers.

- `tasks`: the task of a specification, built in this process or in a confined one
- `built_tasks`: a task that has been built: its subtasks, the order of its samples, its documents
- `lm_eval_tasks`: tasks as lm-eval builds them, from a name, a YAML file or a JSONL file
- `inline_files`: the samples of a JSONL file
- `task_loading`: what lm-eval may read and run while it builds a task
- `prompts`: tokenization, and the requests that a backend answers
- `metrics`: lm-eval's filters and metrics, applied to answers
- `metric_process`: metrics in a separate process, because metrics that set timers need a main thread
- `confined_task`: tasks with Python functions of their own, each in a confined process
- `executed_task`: tasks whose completions are code, which is executed
- `confinement`: which files and system calls a process may use, and its limits
- `task_server`: what runs in these processes
- `execution`: programs that a model wrote, each executed in a confined process of its own
- `execution_server`: what runs in the process that starts these
- `channel`: messages between this process and these processes
- `right_answers`: the right answers of a task's documents
- `references`: the right answers of a task's samples, as tokens to read
- `overlap`: items that two tasks have in common
- `lengths`: how many tokens a task's samples have
- `lm_eval`: score a task's samples: ask a backend, compute the values
"""
