"""Training of one expert or of several experts in turn, each in its directory and from its last checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from service.disk import locked
from service.errors import Conflict
from service.jobs.base import Resources
from service.jobs.finetune.directory import (
    EXPERT_DIR,
    FAILURE_FILE,
    SPEC_FILE,
    SUMMARY_FILE,
    read_document,
    write_document,
    written_spec,
)
from workers.errors import InvalidModel, InvalidTask, TrainingFailed
from workers.file_access import FileAccess
from workers.training.finetuning.spec import FinetuneSpec

__all__ = ["run_finetune", "run_fleet"]

# Errors that another attempt would repeat: workers store them instead of raising them.
FINAL: dict[str, Callable[[str], Exception]] = {
    "InvalidModel": lambda text: InvalidModel((text,)),
    "InvalidTask": InvalidTask,
    "TrainingFailed": TrainingFailed,
}


def run_finetune(
    spec: FinetuneSpec,
    directory: Path,
    *,
    resources: Resources,
    note: Callable[[str], None] = lambda _: None,
    access: FileAccess | None = None,
) -> dict[str, Any]:
    """Train the expert that `spec` describes in `directory`, or continue its training; return the summary.

    Args:
        spec: Specification of the expert.
        directory: Directory of the training, new or from an earlier call with the same `spec`.
        resources: Functions that connect to Ray and train on Ray Train.
        note: Called with messages about the progress.
        access: Files that evaluation tasks may read; None is no limit.

    Raises:
        InvalidModel: The base model cannot be trained.
        InvalidTask: The data or a task cannot be used.
        Conflict: The directory is used by another run or specification, or the cluster is too small.
        ConnectionError: Ray cannot be reached.
        TrainingFailed: The training failed, and another attempt would fail too.
    """
    with locked(directory):
        before = written_spec(directory)
        if before is not None and before != spec:
            raise Conflict(
                f"{directory}: holds another fine-tuning ({before.name!r}), which differs in "
                f"{', '.join(_differences(before, spec))}; give another directory"
            )
        if before is None and (directory / EXPERT_DIR).exists():
            raise Conflict(f"{directory}: holds a model that this fine-tuning did not make; give another directory")
        if (summary := read_document(directory / SUMMARY_FILE)) is not None:
            return summary
        note(f"Checking base model and data of {spec.name} ...")
        _check(spec)
        write_document(directory / SPEC_FILE, spec.canonical())
        (directory / FAILURE_FILE).unlink(missing_ok=True)
        with _ray(resources, note):
            resources.fit(spec, directory, access)
        if (failure := read_document(directory / FAILURE_FILE)) is not None:
            raise FINAL[failure["error"]](failure["message"])
        summary = read_document(directory / SUMMARY_FILE)
        assert summary is not None
        return summary


def run_fleet(
    specs: Mapping[str, FinetuneSpec],
    directories: Mapping[str, Path],
    *,
    resources: Resources,
    note: Callable[[str], None] = lambda _: None,
    finished: Callable[[str, dict[str, Any]], None] = lambda *_: None,
    access: FileAccess | None = None,
) -> dict[str, dict[str, Any]]:
    """Train several experts one after the other, each in its directory, and return their summaries by alias.

    All trainings use one connection to Ray. All experts are checked before the first training starts. `specs` and
    `directories` are by alias. `finished` is called with the alias and the summary of an expert as soon as the expert
    is trained. `resources` are functions that connect to Ray and train on Ray Train; `note` is called with messages
    about the progress; `access` limits the files that evaluation tasks may read. Raises the errors of `run_finetune`.
    """
    unfinished = [alias for alias in specs if read_document(directories[alias] / SUMMARY_FILE) is None]
    if len(unfinished) > 1:
        for alias in unfinished:
            note(f"Checking base model and data of {alias} ...")
            _check(specs[alias])
    summaries = {}
    with _ray(resources, note) if len(unfinished) > 1 else nullcontext():
        for alias, spec in specs.items():
            summaries[alias] = run_finetune(spec, directories[alias], resources=resources, note=note, access=access)
            finished(alias, summaries[alias])
    return summaries


@contextmanager
def _ray(resources: Resources, note: Callable[[str], None]) -> Iterator[None]:
    with resources.ray() as session:
        if session.dashboard_url:
            note(f"Ray dashboard: {session.dashboard_url}/#/actors")
        yield


def _check(spec: FinetuneSpec) -> None:
    """Check everything in an expert's specification that does not need the weights of the base model.

    Raises InvalidModel if the base model cannot be trained, and InvalidTask if the data cannot be used.
    """
    from workers.training.finetuning.trainer import check

    check(spec)


def _differences(before: FinetuneSpec, spec: FinetuneSpec) -> list[str]:
    one, other = before.canonical(), spec.canonical()
    return [name for name in one if one[name] != other[name]]
