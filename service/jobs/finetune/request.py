"""Checks of a submitted fine-tuning before the server stores it: files, base model, data and tasks."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.objectives import DescribedTask
from service.jobs.base import Accepted, RequestContext
from service.studies.preflight.files import (
    FilesRefused,
    file_path_problem,
    model_path_problem,
    model_refusal,
    no_file_problem,
    task_files,
)
from service.types import JobRecord
from workers.errors import InvalidModel, InvalidTask
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.models.modalities import modality_at, modality_of_task
from workers.models.remote import locate
from workers.training.finetuning.fleet import STUDY, Pipeline, parse_pipeline, repeated_objectives
from workers.training.finetuning.spec import BASE_HEAD, NEW_HEAD, FinetuneSpec, task_of

__all__ = [
    "LOCAL_DATA",
    "accept",
    "access_of",
    "artifact_bytes",
    "check_finetune_files",
    "check_server_paths",
    "examine_finetune",
    "foreign_tasks",
    "template_problems",
]

PATH_SUFFIXES = (".yaml", ".yml")
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

# Environment variable of the head of Ray: any value says that other machines do not have the server's data directory.
LOCAL_DATA = "MERGESEARCH_LOCAL_DATA"
NO_DATA = (
    "fine-tunings are not accepted here: their workers write to the server's data directory, which only the head of "
    "Ray has; let Ray's pods mount the volume (value data.workers of the chart), or train with `mergesearch finetune`"
)


def accept(document: Mapping[str, Any], context: RequestContext) -> Accepted:
    """Check the `document` of a submitted fine-tuning as far as possible without the weights of its base model.

    `context` says which files the fine-tuning may read. Raises InvalidStudy with every problem. It also raises
    InvalidStudy if the environment variable LOCAL_DATA says that the machines on which Ray Train's workers run have no
    access to the server's data directory, to which they write.
    """
    if os.environ.get(LOCAL_DATA):
        raise InvalidStudy((Problem("", NO_DATA),))
    pipeline = parse_pipeline(document)
    check_server_paths(pipeline)
    examine_finetune(pipeline, access=context.access)
    return Accepted(
        pipeline.name,
        pipeline.canonical(),
        {"access": context.access and asdict(context.access), "version": version("mergesearch")},
        artifact_bytes=artifact_bytes(pipeline),
    )


def check_server_paths(pipeline: Pipeline) -> None:
    """Check that every path in `pipeline`, the specification of a fine-tuning, is absolute.

    Raises InvalidStudy with every relative path, because the server does not know the working directory of the client.
    """
    problems = [*_problems(pipeline, _path_problems), *_in_study(pipeline, file_path_problem)]
    if problems:
        raise InvalidStudy(tuple(problems))


def check_finetune_files(pipeline: Pipeline, access: FileAccess | None) -> None:
    """Check that the files of a fine-tuning exist, are regular files, and may be read under `access`.

    `pipeline` is the specification, which names the files. If `access` is None, all files may be read. Raises
    FilesRefused with every file, directory, dataset and hub model that `access` does not allow, and InvalidStudy with
    every file that is missing or not a regular file.
    """
    if access is not None:
        refused = (*_problems(pipeline, lambda spec: _refusals(spec, access)), *_in_study(pipeline, access.refusal))
        if refused:
            raise FilesRefused(refused)
    if problems := (*_problems(pipeline, _no_files), *_in_study(pipeline, no_file_problem, folders=False)):
        raise InvalidStudy(problems)


def examine_finetune(pipeline: Pipeline, *, access: FileAccess | None = None) -> None:
    """Check everything in a fine-tuning's specification that can be checked without the weights of the base model.

    `pipeline` is the specification. `access` limits the files that may be read; None is no limit. Nothing is read if
    the specification names a file outside `access`. Raises FilesRefused for such files, and InvalidStudy with every
    other problem.
    """
    from service.results.training import lack_of_losses
    from workers.training.finetuning.trainer import check_data, check_evaluation

    check_finetune_files(pipeline, access)
    problems = list(repeated_objectives(pipeline))
    for alias, spec in pipeline.experts.items():
        own: list[Problem] = []
        try:
            check_data(spec, access=access)
        except InvalidModel as error:
            own += [Problem("base", text) for text in error.problems]
        except InvalidTask as error:
            own.append(Problem("data", str(error)))
        own += () if own else foreign_tasks(spec)
        own += check_evaluation(spec, access=access, reads_base=not own).problems
        problems += [Problem(pipeline.field_of(alias, problem.field), problem.message) for problem in own]
    if pipeline.analysis is not None and not problems:
        problems += lack_of_losses(pipeline, access=access)
    if not problems:
        problems += template_problems(pipeline)
    if problems:
        raise InvalidStudy(tuple(problems))


def template_problems(pipeline: Pipeline) -> tuple[Problem, ...]:
    """Problem of a fine-tuning of chat experts whose study does not say whether prompts get the chat template.

    The evaluations of such experts in the fine-tuning format prompts with the chat template. The study that merges the
    experts does so only if its option `engine.chat_template` says so; without the template, the experts may score 0.
    The result is empty if `pipeline` has no study, if the study states the option, or if no data are conversations.
    Raises InvalidTask if the first row of an expert's data cannot be read.
    """
    from workers.training.finetuning.data import writes_chats

    engine = {} if pipeline.study is None else pipeline.study.get("engine") or {}
    if pipeline.study is None or "chat_template" in engine:
        return ()
    chats = [alias for alias, spec in pipeline.experts.items() if spec.data.images is None and writes_chats(spec)]
    message = (
        f"is not stated, but the data of {', '.join(chats)} are conversations; write true to score merges with the "
        "chat template, as the experts' evaluations do, or false"
    )
    return (Problem(f"{STUDY}.engine.chat_template", message),) if chats else ()


def artifact_bytes(pipeline: Pipeline) -> int:
    """Total bytes that the trained experts of a fine-tuning with the specification `pipeline` will take.

    The number is computed from the headers of the base model's files. Raises InvalidModel if the headers cannot be
    read.
    """
    total = 0
    for spec in pipeline.experts.values():
        base = open_checkpoint(locate(spec.base))
        tensors = base.tensors.values()
        if spec.adapter is None:
            # Parts that are neither trained nor merged, such as CLIP's text tower, are written too.
            written = {**base.unmerged_tensors(), **base.tensors}.values()
            total += sum(math.prod(tensor.shape) for tensor in written) * ELEMENT_BYTES[spec.dtype]
        else:  # at most: two factors for each matrix
            pairs = sum(sum(tensor.shape) for tensor in tensors if len(tensor.shape) == 2)
            total += pairs * spec.adapter.rank * ELEMENT_BYTES["float32"]
    return total


def access_of(job: JobRecord) -> FileAccess | None:
    """Files that a fine-tuning may read, as stored at its creation; None if the fine-tuning may read all files."""
    access = job.accepted.get("access")
    return access and FileAccess.of(access)


def _files(spec: FinetuneSpec, *, folders: bool = True) -> Iterator[tuple[str, str]]:
    """Yield the files that an expert's specification names, as pairs of the specification's field and the file.

    Some fields accept a file or a folder. If `folders` is False, such a field is left out if it names a folder.
    """

    def is_wanted(place: str) -> bool:
        return folders or not os.path.isdir(place)

    if spec.data.file is not None:
        yield "data.file", spec.data.file
    if spec.data.images is not None and not spec.data.is_on_hub and is_wanted(spec.data.images):
        yield "data.images", spec.data.images
    for index, objective in enumerate(spec.evaluation.objectives if spec.evaluation is not None else ()):
        place = f"evaluation.objectives.{index}.task"
        if isinstance(objective.task, DescribedTask):
            if objective.task.is_on_hub:
                continue
            if not objective.task.may_be_folder or is_wanted(objective.task.place):
                yield f"{place}.{objective.task.place_key}", objective.task.place
        elif objective.task.endswith(PATH_SUFFIXES):
            yield place, objective.task


def foreign_tasks(spec: FinetuneSpec) -> Iterator[Problem]:
    """Yield a problem for each evaluation task of `spec` whose data the base model cannot read, such as images."""
    reads = modality_at(locate(spec.base))
    for index, objective in enumerate(spec.evaluation.objectives if spec.evaluation is not None else ()):
        modality = modality_of_task(task_of(objective, seed=spec.seed).task)
        if modality is not reads:
            yield Problem(
                f"evaluation.objectives.{index}.task",
                f"is a task of {modality.name}; the base {spec.base} is a model of {reads.name}",
            )


def _models(spec: FinetuneSpec) -> Iterator[tuple[str, str]]:
    yield "base", spec.base
    if spec.data.head not in (BASE_HEAD, NEW_HEAD):
        yield "data.head", spec.data.head
    for index, expert in enumerate(spec.method.fit_to):
        yield f"method.fit_to.{index}", expert


def _problems(pipeline: Pipeline, find: Callable[[FinetuneSpec], Iterator[tuple[str, str]]]) -> Iterator[Problem]:
    """Yield the problems that the check `find` reports for the experts in a fine-tuning's specification `pipeline`.

    `find` takes an expert's specification, and returns pairs of a field and a message.
    """
    for alias, spec in pipeline.experts.items():
        yield from (Problem(pipeline.field_of(alias, field), message) for field, message in find(spec))


def _in_study(pipeline: Pipeline, find: Callable[[str], str | None], *, folders: bool = True) -> Iterator[Problem]:
    """Yield the problems of the files that tasks name in the study of a fine-tuning, which merges the trained experts.

    `pipeline` is the specification of the fine-tuning, with or without such a study. The check `find` takes a file, and
    returns a message about it, or None if nothing is wrong with the file. If `folders` is False, tasks whose data may
    be a folder are left out.
    """
    study = pipeline.study_of({alias: Path(os.sep) for alias in pipeline.experts})
    for place, file in task_files(study, folders=folders) if study is not None else ():
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
    for place, file in _files(spec, folders=False):
        if problem := no_file_problem(file):
            yield place, problem


def _refusals(spec: FinetuneSpec, access: FileAccess) -> Iterator[tuple[str, str]]:
    for place, model in _models(spec):
        if reason := model_refusal(model, access):
            yield place, reason
    for place, file in _files(spec):
        if reason := access.refusal(file):
            yield place, reason
    # A dataset's files name further files to read, in any directory.
    name = spec.data.dataset
    if name is not None and not (os.path.isabs(name) and access.distrust(name) is None):
        yield (
            "data.dataset",
            f"{name}: a server reads datasets only from directories that its operator trusts with --trust-dir, because "
            "they name further files; give a JSONL file as data.file",
        )
