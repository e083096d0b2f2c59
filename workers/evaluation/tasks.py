"""Building and checking the task of a TaskSpec: in this process, or in a confined process if the task runs code.

A task is a name registered with lm-eval, an lm-eval YAML file, or an inline JSONL file. Metrics, filters and prompts
are lm-eval's. Models and tokenizers are not needed: the function `check_task` runs without an engine, and for inline
tasks even without lm-eval.
"""

from __future__ import annotations

from collections.abc import Mapping

from workers.errors import InvalidTask
from workers.evaluation.built_tasks import BuiltTask
from workers.evaluation.confined_task import ConfinedTask
from workers.evaluation.executed_task import ExecutedTask
from workers.evaluation.lm_eval_tasks import build, inline_rows, inline_template
from workers.evaluation.task_loading import OwnCode
from workers.evaluation.task_reader import reader_of
from workers.models.modalities import modality_of_task
from workers.types import TaskInfo, TaskSpec

__all__ = ["build_task", "check_task", "check_text_task"]


def check_task(spec: TaskSpec) -> TaskInfo:
    """Check the task `spec` without an engine or tokenizer, and return facts about it.

    Prompts that are too long are not counted, because that needs a tokenizer. Raises InvalidTask in these cases:

    - the task, its metric, its split, or its filter (lm-eval's rule that extracts answers from texts) is unknown
    - data are malformed or missing, or are in a file that `spec.access` does not allow
    - the metric is not a mean over samples
    - the task has its own code, and this machine has no sandbox for it
    - the files of images are missing or broken
    """
    return reader_of(spec.task).check(spec)


def check_text_task(spec: TaskSpec) -> TaskInfo:
    """Check a text task, whose samples are prompts and answers, and return facts about it.

    The checks and errors are those of the function `check_task`.
    """
    if isinstance(spec.task, Mapping) and spec.task.get("program") is None:
        rows = inline_rows(spec)
        return TaskInfo(len(rows), higher_is_better=True, output_type="generate_until", template=inline_template(spec))
    with build_task(spec) as task:
        return task.info


def build_task(spec: TaskSpec) -> BuiltTask:
    """Build the lm-eval task or tasks that `spec` names, and fix the order of their samples.

    A task whose files name Python functions is built by a sandboxed process (module `confined_task`). A task that
    executes completions has a sandboxed process that executes them (module `executed_task`). These processes live as
    long as the returned object, or until the object is closed. Raises InvalidTask if the task is unknown, cannot be
    scored, or has no prompts.
    """
    modality = modality_of_task(spec.task)
    if not modality.has_vocabulary:
        raise InvalidTask(f"a task of the modality {modality.name} has no prompts; expected a task of text")
    try:
        task = build(spec)
    except OwnCode:
        return ConfinedTask(spec).built
    if isinstance(spec.task, Mapping) and spec.task.get("program") is not None:
        return ExecutedTask(task, inline_rows(spec)).built
    return task
