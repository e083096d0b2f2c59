"""Prompts for a judge about the samples of a task, and the verdicts in the judge's answers.

A judge is a model that compares a completion with the reference answer (module `search_spaces.study.judge`). This
module sends no requests to the judge; the driver of a study sends them (module `service.tune.judging`).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from search_spaces.study.judge import PLACEHOLDER
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import BuiltTask, Document, PromptSettings, documents_of
from workers.evaluation.tasks import build_task
from workers.types import TaskSpec

__all__ = ["JudgedItem", "judge_prompt", "judged_items", "preference_of", "prompt_digest"]

VERDICT = re.compile(r"\[\[\s*(1|2|tie)\s*\]\]", re.IGNORECASE)


@dataclass(frozen=True)
class JudgedItem:
    """The question of one sample, and the reference answer that completions are compared with."""

    question: str
    reference: str


def judged_items(spec: TaskSpec) -> tuple[JudgedItem, ...]:
    """Question and reference answer of each sample of a task, in scoring order.

    A judge (a language model) compares completions with the reference answer. `spec` is the task. A question is the
    prompt without few-shot examples. If a sample has several right answers, the first right answer is the reference
    answer. Raises InvalidTask if the task cannot be built, does not generate text, draws several completions of a
    prompt, or has a sample without a reference answer.
    """
    with build_task(replace(spec, num_fewshot=0)) as task:
        if task.output_type != "generate_until":
            message = f"task {spec.task}: has the output type {task.output_type}; a judge compares generated text"
            raise InvalidTask(message, "judge")
        documents = documents_of(task, PromptSettings(None, None, ""))
        return tuple(_item(task, documents[subtask][index], subtask, index) for subtask, index in task.order)


def _item(task: BuiltTask, document: Document, subtask: int, index: int) -> JudgedItem:
    where = f"task {task.subtasks[subtask].name}, document {index}"
    instance = document.instances[0]
    if (instance.repeats or 1) > 1:
        raise InvalidTask(f"{where}: draws {instance.repeats} completions of a prompt; a judge compares one", "judge")
    right = document.right()
    if right.lack is not None:
        raise InvalidTask(f"{where}: has no reference answer that a judge could compare with: {right.lack}", "judge")
    return JudgedItem(str(instance.args[0]).strip(), right.texts[0].strip())


def judge_prompt(template: str, item: JudgedItem, completion: str, *, is_swapped: bool) -> str:
    """Prompt that asks a judge, a language model, to compare a completion with the reference answer of an item.

    `template` has placeholders for the question and the two answers. The completion is the first answer, or the second
    answer if `is_swapped`.
    """
    answers = (completion.strip(), item.reference)
    first, second = reversed(answers) if is_swapped else answers
    texts: Mapping[str, str] = {"question": item.question, "first": first, "second": second}
    return PLACEHOLDER.sub(lambda found: texts[found.group(1)], template)  # a text may itself have a placeholder


def prompt_digest(prompt: str) -> str:
    """The sha256 (hex) of the text of a prompt that asks a judge (a language model) to compare answers."""
    return hashlib.sha256(prompt.encode("utf-8", "replace")).hexdigest()


def preference_of(answer: str, *, is_swapped: bool) -> float | None:
    """Read a judge's verdict: 1 if the completion is better than the reference answer, 0 if it is worse, 0.5 for a tie.

    `answer` is the text of the judge, a language model that compares two answers; the last verdict in the text is used.
    `is_swapped` says whether the completion was the second of the two answers. The result is None for a text without a
    verdict.
    """
    verdicts = VERDICT.findall(answer)
    if not verdicts:
        return None
    if verdicts[-1].lower() == "tie":
        return 0.5
    return float((verdicts[-1] == "2") == is_swapped)
