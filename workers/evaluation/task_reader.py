"""What a modality's evaluation tasks must offer besides scoring: facts, texts for people, lengths and references."""

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
    """Interface by which tasks of one modality are read. Every method raises InvalidTask if the task cannot be used."""

    def content(self, task: Mapping[str, Any], access: FileAccess | None = None) -> str:
        """Digest (sha256, hex) of the data of a task that a study file describes by `task`.

        `access` limits the files that the data may name; None is no limit.
        """
        ...

    def check(self, spec: TaskSpec) -> TaskInfo:
        """Check the task `spec` and its data without an engine, and return facts about it."""
        ...

    def texts(self, spec: TaskSpec, start: int, stop: int) -> SampleTexts:
        """Prompt and right answer of the samples [start, stop), in the order of scoring."""
        ...

    def items(self, spec: TaskSpec) -> Iterator[Item]:
        """Yield the samples in the order of the data, by which overlaps between tasks are found."""
        ...

    def lengths(self, spec: TaskSpec, prompts: Prompts, *, cache: str | Path | None = None) -> Lengths:
        """Mean numbers of positions that a model reads and generates for one sample."""
        ...

    def check_models(self, spec: TaskSpec, sources: ResolvedFamily) -> None:
        """Check that the models `sources` can be scored on the task."""
        ...

    def lack_of_references(self, spec: TaskSpec) -> str | None:
        """Reason why no loss can be computed on the right answers; None if one can."""
        ...

    def lack_of_entropy(self, spec: TaskSpec) -> str | None:
        """Reason why predictions on the task have no entropy over classes; None if they have one."""
        ...


def reader_of(task: str | Mapping[str, Any]) -> TaskReader:
    """The reader of a task, by its name or description."""
    return cast(TaskReader, modality_of_task(task).task_reader())
