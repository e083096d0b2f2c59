"""Texts of a task's samples, for people: the prompt, and the right answer."""

from __future__ import annotations

from workers.evaluation.built_tasks import Document, PromptSettings, documents_of
from workers.evaluation.task_reader import reader_of
from workers.evaluation.tasks import build_task
from workers.types import SampleTexts, TaskSpec

__all__ = ["prompts_and_answers", "sample_texts", "text_of"]

SEPARATOR = "\n"


def sample_texts(spec: TaskSpec, start: int, stop: int) -> SampleTexts:
    """Build a task, and return prompt and right answer of its samples [start, stop), in the order of scoring.

    Prompts are without chat template, because a chat template needs a tokenizer. The result is shorter if the task has
    fewer than `stop` samples. Raises InvalidTask if the task cannot be built.
    """
    return reader_of(spec.task).texts(spec, start, stop)


def prompts_and_answers(spec: TaskSpec, start: int, stop: int) -> SampleTexts:
    """Prompt and right answer of each sample [start, stop) of a text task, in the order of scoring.

    The details and errors are those of the function `sample_texts`.
    """
    with build_task(spec) as task:
        documents = documents_of(task, PromptSettings(None, None, ""))
        return tuple(text_of(documents[subtask][index]) for subtask, index in task.order[start:stop])


def text_of(document: Document) -> tuple[str, str | None]:
    """Prompt and right answer of a document.

    The prompt has the few-shot examples. If a document has several right answers, they are joined by line breaks. The
    right answer is None if the task does not state it as text.
    """
    right = document.right()
    answers = right.texts or tuple(right.options[index] for index in right.right)
    return str(document.instances[0].args[0]), SEPARATOR.join(answer.strip() for answer in answers) or None
