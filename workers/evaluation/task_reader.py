"""TaskReader: interface for checks, facts and texts of evaluation tasks, which text and image tasks implement."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from workers.file_access import FileAccess
from workers.models.modalities import modality_of_task
from workers.types import SampleTexts, TaskInfo, TaskSpec

if TYPE_CHECKING:
    from workers.evaluation.prompts import Prompts
    from workers.evaluation.sample_facts import Item, Lengths
    from workers.models.family import ResolvedFamily

__all__ = ["TaskReader", "reader_of"]


class TaskReader(Protocol):
    """Interface for reading the evaluation tasks of one modality, text or images, without scoring them.

    Every method raises InvalidTask if the task cannot be used.
    """

    def content(self, task: Mapping[str, Any], access: FileAccess | None = None) -> str:
        """The sha256 (hex) of the data of a task; `task` is its description in the study file.

        `access` limits the files that the data may name; None is no limit.
        """
        ...

    def check(self, spec: TaskSpec) -> TaskInfo:
        """Check the task `spec` and its data without an engine, and return facts about it."""
        ...

    def texts(self, spec: TaskSpec, start: int, stop: int) -> SampleTexts:
        """Prompt and right answer of the samples [start, stop) of the task `spec`, in the order of scoring."""
        ...

    def items(self, spec: TaskSpec) -> Iterator[Item]:
        """Yield the task's samples as items (texts or hashes of images), by which overlaps between tasks are found."""
        ...

    def lengths(self, spec: TaskSpec, prompts: Prompts, *, cache: str | Path | None = None) -> Lengths:
        """Mean numbers of tokens that a model reads and generates for one sample of the task `spec`.

        `prompts` has the properties of the model that prompts depend on. `cache` is the directory of the cache, or None
        for the default directory.
        """
        ...

    def check_models(self, spec: TaskSpec, sources: ResolvedFamily) -> None:
        """Check that the models `sources` can be scored on the task `spec`; raise InvalidTask if a model cannot."""
        ...

    def lack_of_references(self, spec: TaskSpec) -> str | None:
        """Reason why no loss can be computed on the task's right answers; None if a loss can be computed."""
        ...

    def lack_of_entropy(self, spec: TaskSpec) -> str | None:
        """Reason why the entropy of a model's predictions on the task cannot be computed; None if it can be."""
        ...


def reader_of(task: str | Mapping[str, Any]) -> TaskReader:
    """The reader for text tasks or for image tasks, whichever reads `task`, a task's name or description."""
    return cast(TaskReader, modality_of_task(task).task_reader())
