"""Checks of fine-tunings before they are accepted: which files they read, their base, their data and their tasks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.objectives import InlineTask
from service.studies.preflight.files import (
    FilesRefused,
    file_path_problem,
    model_path_problem,
    model_refusal,
    no_file_problem,
    task_files,
)
from service.types import ResolvedStudy
from workers.errors import InvalidModel, InvalidTask
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.models.hub import locate
from workers.training.finetuning.fleet import STUDY, Pipeline
from workers.training.finetuning.spec import FinetuneSpec, task_of

__all__ = ["artifact_bytes", "check_finetune_files", "check_server_paths", "examine_finetune", "resolved_finetune"]

PATH_SUFFIXES = (".yaml", ".yml")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_server_paths(pipeline: Pipeline) -> None:
    """Raises InvalidStudy with every path in `pipeline` that is relative, which a server cannot take."""
    problems = [*_problems(pipeline, _path_problems), *_in_study(pipeline, file_path_problem)]
    if problems:
        raise InvalidStudy(tuple(problems))


def check_finetune_files(pipeline: Pipeline, access: FileAccess | None) -> None:
    """Raises FilesRefused with every file, directory, dataset and hub model outside `access` (None: no limit), and
    InvalidStudy if one of the files is something else."""
    if access is not None:
        refused = (*_problems(pipeline, lambda spec: _refusals(spec, access)), *_in_study(pipeline, access.refusal))
        if refused:
            raise FilesRefused(refused)
    if problems := (*_problems(pipeline, _no_files), *_in_study(pipeline, no_file_problem)):
        raise InvalidStudy(problems)


def examine_finetune(pipeline: Pipeline, *, access: FileAccess | None = None) -> None:
    """Check everything that can be checked without the base's weights. `access` limits the files that are read (None:
    no limit): if others are named, nothing is opened. Raises InvalidStudy with every problem."""
    from service.results.training import lack_of_losses
    from workers.evaluation.tasks import check_task
    from workers.training.finetuning.trainer import check_data

    check_finetune_files(pipeline, access)
    problems: list[Problem] = []
    for alias, spec in pipeline.experts.items():
        try:
            check_data(spec)
        except InvalidModel as error:
            problems += [Problem(pipeline.field_of(alias, "base"), text) for text in error.problems]
        except InvalidTask as error:
            problems.append(Problem(pipeline.field_of(alias, "data"), str(error)))
        for index, objective in enumerate(spec.evaluation.objectives if spec.evaluation is not None else ()):
            try:
                check_task(task_of(objective, seed=spec.seed, access=access))
            except InvalidTask as error:
                field = f"evaluation.objectives.{index}.{error.field}"
                problems.append(Problem(pipeline.field_of(alias, field), str(error)))
    if pipeline.analysis is not None and not problems:
        problems += lack_of_losses(pipeline, access=access)
    if problems:
        raise InvalidStudy(tuple(problems))


def artifact_bytes(pipeline: Pipeline) -> int:
    """What the weights of all experts will take, from the base's headers. Raises InvalidModel."""
    total = 0
    for spec in pipeline.experts.values():
        tensors = open_checkpoint(locate(spec.base)).tensors.values()
        if spec.adapter is None:
            total += sum(math.prod(tensor.shape) for tensor in tensors) * ELEMENT_BYTES[spec.dtype]
        else:  # at most: two factors for each matrix
            pairs = sum(sum(tensor.shape) for tensor in tensors if len(tensor.shape) == 2)
            total += pairs * spec.adapter.rank * ELEMENT_BYTES["float32"]
    return total


def resolved_finetune(*, access: FileAccess | None = None, num_bytes: int = 0) -> ResolvedStudy:
    """What is stored of a fine-tuning that was accepted: what it may read, what its experts will take, the version."""
    return ResolvedStudy(
        fingerprints={},
        num_layers=0,
        tasks={},
        holdout_tasks={},
        rung_samples=(),
        max_staleness=0,
        objectives=(),
        version=version("mergesearch"),
        access=access,
        artifact_bytes=num_bytes,
    )


def _files(spec: FinetuneSpec) -> Iterator[tuple[str, str]]:
    """The files that a specification names, each with its place."""
    if spec.data.file is not None:
        yield "data.file", spec.data.file
    for index, objective in enumerate(spec.evaluation.objectives if spec.evaluation is not None else ()):
        place = f"evaluation.objectives.{index}.task"
        if isinstance(objective.task, InlineTask):
            yield f"{place}.file", objective.task.file
        elif objective.task.endswith(PATH_SUFFIXES):
            yield place, objective.task


def _models(spec: FinetuneSpec) -> Iterator[tuple[str, str]]:
    yield "base", spec.base
    for index, expert in enumerate(spec.method.fit_to):
        yield f"method.fit_to.{index}", expert


def _problems(pipeline: Pipeline, find: Callable[[FinetuneSpec], Iterator[tuple[str, str]]]) -> Iterator[Problem]:
    """What `find` finds, a field and a message each, in the specifications of all experts."""
    for alias, spec in pipeline.experts.items():
        yield from (Problem(pipeline.field_of(alias, field), message) for field, message in find(spec))


def _in_study(pipeline: Pipeline, find: Callable[[str], str | None]) -> Iterator[Problem]:
    """What `find` finds in the files that the pipeline's study names as tasks."""
    study = pipeline.study_of({alias: Path(os.sep) for alias in pipeline.experts})
    for place, file in task_files(study) if study is not None else ():
        if message := find(file):
            yield Problem(f"{STUDY}.{place}", message)


def _path_problems(spec: FinetuneSpec) -> Iterator[tuple[str, str]]:
    datasets = () if spec.data.dataset is None else (("data.dataset", spec.data.dataset),)
    for place, model in (*_models(spec), *datasets):
        if problem := model_path_problem(model):
            yield place, problem
    for place, file in _files(spec):
        if problem := file_path_problem(file):
            yield place, problem


def _no_files(spec: FinetuneSpec) -> Iterator[tuple[str, str]]:
    for place, file in _files(spec):
        if problem := no_file_problem(file):
            yield place, problem


def _refusals(spec: FinetuneSpec, access: FileAccess) -> Iterator[tuple[str, str]]:
    for place, model in _models(spec):
        if reason := model_refusal(model, access):
            yield place, reason
    for place, file in _files(spec):
        if reason := access.refusal(file):
            yield place, reason
    # A dataset's own files say which others are read, wherever these are.
    name = spec.data.dataset
    if name is not None and not (os.path.isabs(name) and access.distrust(name) is None):
        yield (
            "data.dataset",
            f"{name}: a server reads datasets only from directories that its operator trusts with --trust-dir, because "
            "they name further files; give a JSONL file as data.file",
        )
