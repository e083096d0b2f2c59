"""Reader of text tasks: lm-eval's tasks, and JSONL files of prompts and answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.evaluation.lengths import text_lengths
from workers.evaluation.lm_eval_tasks import content_hash
from workers.evaluation.overlap import text_items
from workers.evaluation.sample_facts import Item, Lengths
from workers.evaluation.sample_texts import prompts_and_answers
from workers.evaluation.tasks import check_text_task
from workers.file_access import FileAccess
from workers.types import SampleTexts, TaskInfo, TaskSpec

if TYPE_CHECKING:
    from workers.evaluation.prompts import Prompts
    from workers.models.family import ResolvedFamily

__all__ = ["TEXT_TASKS", "TextTasks"]


class TextTasks:
    """Reader of text tasks; it implements the interface `workers.evaluation.task_reader.TaskReader`."""

    def content(self, task: Mapping[str, Any], access: FileAccess | None = None) -> str:
        return content_hash(str(task["file"]))

    def check(self, spec: TaskSpec) -> TaskInfo:
        return check_text_task(spec)

    def texts(self, spec: TaskSpec, start: int, stop: int) -> SampleTexts:
        return prompts_and_answers(spec, start, stop)

    def items(self, spec: TaskSpec) -> Iterator[Item]:
        return text_items(spec)

    def lengths(self, spec: TaskSpec, prompts: Prompts, *, cache: str | Path | None = None) -> Lengths:
        return text_lengths(spec, prompts, cache=cache)

    def check_models(self, spec: TaskSpec, sources: ResolvedFamily) -> None:
        """Do nothing: every text model can be scored on every text task."""

    def lack_of_references(self, spec: TaskSpec) -> str | None:
        from workers.evaluation.references import lack_of_right_answers

        return lack_of_right_answers(spec)

    def lack_of_entropy(self, spec: TaskSpec) -> str | None:
        return "its answers are texts; the entropy of predictions is one over the classes of a task of images"


TEXT_TASKS = TextTasks()
