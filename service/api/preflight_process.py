"""Parses and checks the study or fine-tuning in a request's body, with the same checks as the command line.

The checks import torch and lm-eval and read models, so they run in separate processes, the validators, within limits of
time, processor time and memory: no body can stop the server, and no client can stop another one's requests.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psutil

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study, parse_study
from search_spaces.study.yaml import parse_document
from service.api.limits.fair_queue import FairQueue
from service.api.problems import Unavailable
from service.api.worker_process import CallLimits, LimitExceeded, ProcessDied, WorkerProcess, lift_limits
from service.disk import artifacts_dir
from service.store import Store
from service.studies.chains import SOURCES, on_server, with_exported_sources
from service.studies.policies.start import check_start
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.examine import PreflightResult, examine
from service.studies.preflight.files import (
    check_files,
    file_path_problem,
    model_path_problem,
    no_file_problem,
    task_files,
)
from service.studies.preflight.finetune import (
    artifact_bytes,
    check_finetune_files,
    check_server_paths,
    examine_finetune,
    resolved_finetune,
)
from service.types import ChainedSource, JobKind, ResolvedStudy
from workers.file_access import FileAccess
from workers.models.hub import hub_cache
from workers.training.finetuning.fleet import Pipeline, parse_pipeline

__all__ = [
    "Limits",
    "Preflight",
    "PreflightOutcome",
    "PreflightProcess",
    "ServerPlace",
    "default_access",
    "examine_here",
    "read_finetune",
    "read_request",
]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Validators are started when they are needed; each takes about 0.7 GB of memory.
NUM_VALIDATORS = 3

# Waiting requests of one client, and clients with waiting requests.
MAX_WAITING = 32
MAX_CLIENTS = 64

BODY = "the request's body"


def _memory_share() -> int:
    """A quarter of this machine's memory, from 2 to 8 GiB."""
    total: int = psutil.virtual_memory().total
    return max(2 * 2**30, min(total // 4, 8 * 2**30))


@dataclass(frozen=True)
class Limits:
    """What one request may take: seconds and, until the weights are read, seconds of processor time and bytes of
    memory.

    Reading the weights of large models for the first time takes minutes, and maps all of their files."""

    time_s: float = 900.0
    cpu_s: int = 300
    memory_bytes: int = field(default_factory=_memory_share)


@dataclass(frozen=True)
class PreflightOutcome:
    """A study or fine-tuning that passed preflight: its canonical document, and what its names resolve to."""

    name: str
    document: Mapping[str, Any]
    resolved: ResolvedStudy


@dataclass(frozen=True)
class ServerPlace:
    """Where a server keeps its studies: the URL of its database, and its data directory."""

    store_url: str
    directory: Path


class Preflight(Protocol):
    """Checks studies and fine-tunings for the server."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def examine(
        self, content: bytes, *, is_json: bool, kind: JobKind = JobKind.SEARCH, client: str = ""
    ) -> PreflightOutcome:
        """The outcome of a body that is a study or fine-tuning, as `kind` says. Raises InvalidStudy with every problem,
        and Unavailable if no check is possible at the moment. `client` is the sender, whose requests wait for each
        other before others wait for them."""

    async def engine_dtype(self, document: Mapping[str, Any], *, client: str = "") -> str:
        """The dtype that a study's engines score in."""


class PreflightProcess:
    """Runs preflights in separate processes, each within `limits` (None: the defaults).

    Studies may read the files in `access`; None: all. `place` has the studies whose merges they may name. All but one
    of the processes may be at work for one client."""

    def __init__(
        self,
        access: FileAccess | None = None,
        *,
        place: ServerPlace | None = None,
        limits: Limits | None = None,
        num_validators: int = NUM_VALIDATORS,
    ) -> None:
        self._access = access
        self._place = place
        self._limits = limits or Limits()
        self._queue = FairQueue(num_validators, max_waiting=MAX_WAITING, max_clients=MAX_CLIENTS)
        self._validators = [WorkerProcess(f"validator {number}", warm_up=_warm_up) for number in range(num_validators)]
        self._idle = list(reversed(self._validators))

    @property
    def pid(self) -> int | None:
        """The process that is used first."""
        return self._validators[0].pid

    def start(self) -> None:
        self._validators[0].start()

    def stop(self) -> None:
        for validator in self._validators:
            validator.stop()

    async def examine(
        self, content: bytes, *, is_json: bool, kind: JobKind = JobKind.SEARCH, client: str = ""
    ) -> PreflightOutcome:
        return await self._call(
            client, examine_here, content, is_json=is_json, kind=kind, access=self._access, place=self._place
        )

    async def engine_dtype(self, document: Mapping[str, Any], *, client: str = "") -> str:
        return await self._call(client, _engine_dtype, document)

    async def _call(self, client: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        async with self._queue.turn(client), self._validator() as validator:
            limits = CallLimits(self._limits.cpu_s, self._limits.memory_bytes)

            async def call() -> Result:
                return await validator.call(function, *args, timeout_s=self._limits.time_s, limits=limits, **kwargs)

            try:
                try:
                    return await call()
                except ProcessDied:  # perhaps because of an earlier request
                    return await call()
            except ProcessDied as error:
                raise Unavailable(f"the study could not be checked ({error}); try again") from error
            except TimeoutError as error:
                raise _too_much(f"{self._limits.time_s:g} s") from error
            except LimitExceeded as error:
                raise _too_much(str(error)) from error

    @asynccontextmanager
    async def _validator(self) -> AsyncIterator[WorkerProcess]:
        validator = self._idle.pop()
        try:
            yield validator
        finally:
            self._idle.append(validator)
            self._idle.sort(key=self._validators.index, reverse=True)


def default_access(data_dir: Path) -> FileAccess:
    """Studies may read what is in `data_dir`, in the working directory, and in the hub's cache."""
    return FileAccess(tuple(map(str, (data_dir.resolve(), Path.cwd(), hub_cache()))))


def _too_much(limit: str) -> InvalidStudy:
    message = (
        f"checking the study takes more than {limit}, the limit for one request; name smaller models or task data. "
        "Weights that were read are remembered: for large models, send the study again, or run "
        "`mergesearch run STUDY --check` on the server's machine first, which has no limit"
    )
    return InvalidStudy((Problem("", message),))


def read_request(content: bytes, *, is_json: bool, access: FileAccess | None = None) -> Study:
    """The study in a body. Raises InvalidStudy with every problem, also of paths: relative or outside `access`."""
    study = _read(content, parse_study, is_json=is_json)
    models = {"base": study.models.base} | {f"experts.{alias}": v for alias, v in study.models.named.items()}
    found = {f"models.{place}": model_path_problem(value) for place, value in models.items()}
    found |= {place: file_path_problem(file) for place, file in task_files(study)}
    if problems := tuple(Problem(place, text) for place, text in found.items() if text):
        raise InvalidStudy(problems)
    check_files(study, access)
    found = {place: no_file_problem(file) for place, file in task_files(study)}
    if problems := tuple(Problem(place, text) for place, text in found.items() if text):
        raise InvalidStudy(problems)
    return study


def read_finetune(content: bytes, *, is_json: bool, access: FileAccess | None = None) -> Pipeline:
    """The fine-tuning in a body. Raises as `read_request`."""
    pipeline = _read(content, parse_pipeline, is_json=is_json)
    check_server_paths(pipeline)
    check_finetune_files(pipeline, access)
    return pipeline


def _read(content: bytes, parse: Callable[[dict[str, Any]], Result], *, is_json: bool) -> Result:
    try:
        return parse(parse_document(content, BODY, is_json=is_json))
    except RecursionError as error:
        raise InvalidStudy((Problem("", f"{BODY}: is nested too deeply"),)) from error


def _with_sources(study: Study, place: ServerPlace | None) -> tuple[Study, Mapping[str, ChainedSource]]:
    """The study with the merges of other studies as directories. Raises InvalidStudy."""
    if not study.models.chained and study.models.path_of is None:
        return study, {}
    if place is None:
        places = [f"models.experts.{alias}.from_study" for alias in study.models.chained]
        places += ["models.path_of"] if study.models.path_of is not None else []
        raise InvalidStudy(tuple(Problem(at, "studies here cannot name merges of others") for at in places))
    lift_limits()
    store = Store(place.store_url)
    try:
        return with_exported_sources(study, open_study=on_server(store), directory=place.directory)
    finally:
        store.close()


def _check_start(preflight: PreflightResult, place: ServerPlace | None) -> None:
    """Raises InvalidStudy for policies to begin with that cannot be had."""
    if preflight.study.search.hm3.start is None:
        return
    if place is None:
        raise InvalidStudy((Problem("search.hm3.start", "studies here cannot name policies of others"),))
    store = Store(place.store_url)
    try:
        check_start(preflight, open_study=on_server(store), artifacts_in=artifacts_dir(place.directory))
    finally:
        store.close()


# Run in the separate process.


def _warm_up() -> None:
    import lm_eval.tasks
    import torch
    import transformers

    del lm_eval, torch, transformers


def examine_here(
    content: bytes,
    *,
    is_json: bool,
    kind: JobKind = JobKind.SEARCH,
    access: FileAccess | None = None,
    place: ServerPlace | None = None,
) -> PreflightOutcome:
    """Run the preflight in this process. Weights are read without limits of memory and processor time: their amount is
    not the sender's choice, and reading large ones maps all of their files. So are merges of other studies written,
    which `place` has."""
    check = _examined_finetune if kind is JobKind.FINETUNE else _examined_study
    try:
        return check(content, is_json=is_json, access=access, place=place)
    except (InvalidStudy, MemoryError):
        raise
    except Exception as error:  # its driver runs the same checks and would fail too
        logger.exception("a %s could not be checked", kind.noun)
        message = f"the {kind.noun} could not be checked: {type(error).__name__}: {error}"
        raise InvalidStudy((Problem("", message),)) from error


def _examined_study(
    content: bytes, *, is_json: bool, access: FileAccess | None, place: ServerPlace | None
) -> PreflightOutcome:
    study = read_request(content, is_json=is_json, access=access)
    exported, chained = _with_sources(study, place)
    if chained and access is not None and place is not None:
        access = replace(access, readable=(*access.readable, str(place.directory.resolve() / SOURCES)))
    preflight = examine(exported, downloads=False, access=access, chained=chained, before_weights=lift_limits)
    _check_start(preflight, place)
    return PreflightOutcome(study.name, study.canonical(), preflight.resolved())


def _examined_finetune(
    content: bytes, *, is_json: bool, access: FileAccess | None, place: ServerPlace | None
) -> PreflightOutcome:
    pipeline = read_finetune(content, is_json=is_json, access=access)
    examine_finetune(pipeline, access=access)
    return PreflightOutcome(
        pipeline.name, pipeline.canonical(), resolved_finetune(access=access, num_bytes=artifact_bytes(pipeline))
    )


def _engine_dtype(document: Mapping[str, Any]) -> str:
    return engine_dtype(Study.model_validate(document))
