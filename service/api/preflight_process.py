"""Parses and checks the study in a request's body, with the same checks as the command line.

The checks import torch and lm-eval and read models, so they run in a separate process: no body can stop the server.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import InlineTask, ObjectiveSpec, Study, parse_study
from search_spaces.study.yaml import parse_document
from service.api.problems import Unavailable
from service.api.worker_process import ProcessDied, WorkerProcess
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.examine import examine
from service.types import ResolvedStudy

__all__ = ["Preflight", "PreflightOutcome", "PreflightProcess", "examine_here", "read_request"]

logger = logging.getLogger(__name__)

# Reading the weights of large models for the first time takes minutes; a preflight that takes longer than this hangs.
TIMEOUT_S = 1800.0

BODY = "the request's body"


@dataclass(frozen=True)
class PreflightOutcome:
    """A study that passed preflight: its canonical document, and what its names resolve to."""

    name: str
    document: Mapping[str, Any]
    resolved: ResolvedStudy


class Preflight(Protocol):
    """Checks studies for the server."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def examine(self, content: bytes, *, is_json: bool) -> PreflightOutcome:
        """Raises InvalidStudy with every problem, and Unavailable if no check is possible at the moment."""

    async def engine_dtype(self, document: Mapping[str, Any]) -> str:
        """The dtype that a study's engines score in."""


class PreflightProcess:
    """Runs the preflight in a separate process."""

    def __init__(self) -> None:
        self._process = WorkerProcess("preflight", warm_up=_warm_up)

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.stop()

    async def examine(self, content: bytes, *, is_json: bool) -> PreflightOutcome:
        try:
            try:
                return await self._process.call(examine_here, content, is_json=is_json, timeout_s=TIMEOUT_S)
            except ProcessDied:  # perhaps because of an earlier request
                return await self._process.call(examine_here, content, is_json=is_json, timeout_s=TIMEOUT_S)
        except ProcessDied as error:
            raise Unavailable(f"the study could not be checked ({error}); try again") from error
        except TimeoutError as error:
            message = f"the preflight did not finish within {TIMEOUT_S:.0f} s"
            raise InvalidStudy((Problem("", message),)) from error

    async def engine_dtype(self, document: Mapping[str, Any]) -> str:
        try:
            return await self._process.call(_engine_dtype, document)
        except ProcessDied as error:
            raise Unavailable(str(error)) from error


def read_request(content: bytes, *, is_json: bool) -> Study:
    """The study in a body. Raises InvalidStudy with every problem, relative paths included."""
    try:
        study = parse_study(parse_document(content, BODY, is_json=is_json))
    except RecursionError as error:
        raise InvalidStudy((Problem("", f"{BODY}: is nested too deeply"),)) from error
    if problems := tuple(_path_problems(study)):
        raise InvalidStudy(problems)
    return study


def _path_problems(study: Study) -> Iterator[Problem]:
    models = {"base": study.models.base} | {f"experts.{alias}": v for alias, v in study.models.experts.items()}
    for place, value in models.items():
        # As in a study file: `name` and `owner/name` are hub ids unless a directory has that name.
        is_path = value.startswith((".", "~")) or value.endswith("/") or value.count("/") > 1 or os.path.exists(value)
        if is_path and not os.path.isabs(value):
            yield Problem(f"models.{place}", _relative(value))
    for section, specs in (("objectives", study.objectives), ("holdout", study.holdout)):
        for index, spec in enumerate(specs):
            yield from _file_problems(spec, f"{section}.{index}.task")


def _file_problems(spec: ObjectiveSpec, place: str) -> Iterator[Problem]:
    if isinstance(spec.task, InlineTask):
        place, file = f"{place}.file", spec.task.file
    elif spec.task.endswith((".yaml", ".yml")):
        file = spec.task
    else:
        return
    if not os.path.isabs(file):
        yield Problem(place, _relative(file))
    elif os.path.exists(file) and not os.path.isfile(file):  # a device or a pipe might never end
        yield Problem(place, f"{file}: is not a file")


def _relative(value: str) -> str:
    return f"{value}: is relative; give an absolute path on the server"


# Run in the separate process.


def _warm_up() -> None:
    import lm_eval.tasks
    import torch
    import transformers

    del lm_eval, torch, transformers


def examine_here(content: bytes, *, is_json: bool) -> PreflightOutcome:
    """Run the preflight in this process."""
    study = read_request(content, is_json=is_json)
    try:
        return PreflightOutcome(study.name, study.canonical(), examine(study, downloads=False).resolved())
    except InvalidStudy:
        raise
    except Exception as error:  # the study's driver runs the same checks and would fail too
        logger.exception("study %s could not be checked", study.name)
        message = f"the study could not be checked: {type(error).__name__}: {error}"
        raise InvalidStudy((Problem("", message),)) from error


def _engine_dtype(document: Mapping[str, Any]) -> str:
    return engine_dtype(Study.model_validate(document))
