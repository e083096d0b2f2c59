"""Checks that a study or fine-tuning names only files that it may read, with paths that a server accepts.

These checks open no file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.attacks import BertAttack
from search_spaces.study.file import Study
from search_spaces.study.objectives import DescribedTask
from workers.file_access import FileAccess
from workers.models.remote import hub_cache
from workers.object_store import is_object_url

__all__ = [
    "FilesRefused",
    "attack_models",
    "check_files",
    "file_path_problem",
    "model_path_problem",
    "model_refusal",
    "no_file_problem",
    "task_files",
]


class FilesRefused(InvalidStudy):
    """Raised if a study names files that it may not read.

    Retrying does not help, because the list of files that a study may read is stored with the study.
    """


def check_files(study: Study, access: FileAccess | None, *, section: str = "") -> None:
    """Check that `access` allows all files, models and judges in a study file, or in one `section` of it.

    A judge is an LLM behind a URL that rates completions. If `access` is None, everything is allowed. Raises
    FilesRefused with each file, directory, hub model and judge that is not allowed. Files that task files refer to,
    such as included files, are checked when they are read (`workers.evaluation`).
    """
    found = () if access is None else _problems(study, access)
    if problems := tuple(problem for problem in found if problem.field.startswith(section)):
        raise FilesRefused(problems)


def _problems(study: Study, access: FileAccess) -> Iterator[Problem]:
    for place, model in (("base", study.models.base), *((f"experts.{a}", m) for a, m in study.models.named.items())):
        if reason := model_refusal(model, access):
            yield Problem(f"models.{place}", reason)
    for place, model in attack_models(study):
        if reason := model_refusal(model, access):
            yield Problem(place, reason)
    for index, benchmark in enumerate(study.benchmarks):
        if benchmark.judge is not None and (reason := access.judge_refusal(benchmark.judge.url)):
            yield Problem(f"benchmarks.{index}.judge.url", reason)
    for place, file in _recipe_files(study):
        if reason := access.refusal(file):
            yield Problem(place, reason)
    for place, spec in study.with_tasks():
        described = spec.task if isinstance(spec.task, DescribedTask) else None
        file = spec.task.place if isinstance(spec.task, DescribedTask) else spec.task
        if (described is None and Path(file).suffix not in (".yaml", ".yml")) or (described and described.is_on_hub):
            continue  # the name of one of lm-eval's tasks, or of a data set of the hub
        if reason := access.refusal(file):
            yield Problem(f"{place}.task{'' if described is None else f'.{described.place_key}'}", reason)


def model_refusal(model: str, access: FileAccess) -> str | None:
    """Reason why a model must not be read under the permissions `access`, or None if the model may be read.

    The model is given as a directory, hub id or URL.
    """
    if is_object_url(model) or os.path.isabs(model) or os.path.exists(model):
        return access.refusal_of_all(model)
    reason = access.refusal(hub_cache())
    return f"{model}: models of the hub are read from its cache: {reason}" if reason else None


def task_files(study: Study, *, folders: bool = True) -> Iterator[tuple[str, str]]:
    """The files that a study names as tasks and recipes, each as (place in the study file, path of the file).

    A place is a dotted path of keys, such as "objectives.0.task". With `folders` False, tasks whose data may be a
    folder are left out.
    """
    for place, spec in study.with_tasks():
        if isinstance(spec.task, DescribedTask):
            if not spec.task.is_on_hub and (folders or not spec.task.may_be_folder):
                yield f"{place}.task.{spec.task.place_key}", spec.task.place
        elif spec.task.endswith((".yaml", ".yml")):
            yield f"{place}.task", spec.task
    yield from _recipe_files(study)


def _recipe_files(study: Study) -> Iterator[tuple[str, str]]:
    for index, given in enumerate(study.search.recipes):
        if given.file is not None:
            yield f"search.recipes.{index}.file", given.file


def attack_models(study: Study) -> Iterator[tuple[str, str]]:
    """Yield the models that prompt attacks on benchmarks use, as pairs (place in the study file, model).

    An attack searches for the prompt template with the worst metric; its models propose and compare words. A place is a
    dotted path of keys, such as "benchmarks.0.attack.model". A model is a directory, hub id or URL.
    """
    for index, spec in enumerate(study.benchmarks):
        if isinstance(spec.attack, BertAttack):
            yield f"benchmarks.{index}.attack.model", spec.attack.model
            if spec.attack.encoder is not None:
                yield f"benchmarks.{index}.attack.encoder", spec.attack.encoder


def model_path_problem(model: str) -> str | None:
    """Reason why a server does not accept the model `model`; None if it is accepted.

    A directory must be given as an absolute path. Hub ids and URLs of object stores are always accepted.
    """
    if is_object_url(model):
        return None
    # As in a study file: `name` and `owner/name` are hub ids unless a directory has that name.
    is_path = model.startswith((".", "~")) or model.endswith("/") or model.count("/") > 1 or os.path.exists(model)
    return _relative(model) if is_path and not os.path.isabs(model) else None


def file_path_problem(file: str) -> str | None:
    """Reason why a server does not accept the path `file`; None if it is accepted.

    The path must be absolute. A URL of an object store is always accepted.
    """
    return None if os.path.isabs(file) or is_object_url(file) else _relative(file)


def no_file_problem(file: str) -> str | None:
    """Reason why `file` cannot be opened as a regular file: it is a directory, a device or a pipe.

    Returns None for a regular file, and for a missing file, which is reported when it is opened.
    """
    # Reading a device or a pipe might never end.
    return f"{file}: is not a file" if os.path.exists(file) and not os.path.isfile(file) else None


def _relative(value: str) -> str:
    return f"{value}: is relative; give an absolute path on the server"
