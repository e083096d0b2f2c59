"""Checks that a study names only files that it may read. Nothing is opened here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import InlineTask, Study
from workers.file_access import FileAccess
from workers.models.hub import hub_cache

__all__ = ["FilesRefused", "check_files"]


class FilesRefused(InvalidStudy):
    """A study names files that it may not read. Waiting does not change that: what it may read is stored with it."""


def check_files(study: Study, access: FileAccess | None) -> None:
    """Raises FilesRefused with every file, directory and hub model of `study` outside `access` (None: no limit).

    What task files lead to, such as included files, is checked when they are read (`workers.evaluation`)."""
    if access is not None and (problems := tuple(_problems(study, access))):
        raise FilesRefused(problems)


def _problems(study: Study, access: FileAccess) -> Iterator[Problem]:
    for place, model in (("base", study.models.base), *((f"experts.{a}", m) for a, m in study.models.named.items())):
        if reason := _model_refusal(model, access):
            yield Problem(f"models.{place}", reason)
    for place, spec in study.with_tasks():
        is_inline = isinstance(spec.task, InlineTask)
        file = spec.task.file if isinstance(spec.task, InlineTask) else spec.task
        if not is_inline and Path(file).suffix not in (".yaml", ".yml"):
            continue  # the name of one of lm-eval's tasks
        if reason := access.refusal(file):
            yield Problem(f"{place}.task{'.file' if is_inline else ''}", reason)


def _model_refusal(model: str, access: FileAccess) -> str | None:
    if os.path.isabs(model) or os.path.exists(model):
        return access.refusal_of_all(model)
    reason = access.refusal(hub_cache())
    return f"{model}: models of the hub are read from its cache: {reason}" if reason else None
