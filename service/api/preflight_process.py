"""Checks of submitted jobs in separate processes, the validators, with limits of time and memory.

The checks import torch and lm-eval and read models. They run outside the server's process, with limits of elapsed time,
processor time and memory. Therefore no request's body can stop the server, and no client can stop the requests of
another client. If jobs run on other machines, the checks run on the head node of the Ray cluster (`NodeCalls.place`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import anyio
import anyio.to_thread

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.file import Study
from search_spaces.study.yaml import parse_document
from service.api.limits.fair_queue import FairQueue
from service.api.problems import Unavailable
from service.cluster.job_client import ANSWER_S
from service.cluster.node_calls import Node, NodeCalls
from service.engine_machines import EngineMachines
from service.errors import InvalidQuery
from service.jobs.base import Accept, Accepted, JobKind, RequestContext
from service.resolved_study import ResolvedStudy
from service.studies.benchmarks import check_added
from service.studies.enqueued import check_enqueued
from service.studies.mergekit import mergekit_file
from service.studies.preflight.dtype import engine_dtype
from service.threads import Work, limiter
from service.types import Account, JobRecord
from service.worker_process import CallLimits, LimitExceeded, ProcessDied, WorkerProcess, lift_limits
from workers.engines.host_memory import total_host_bytes
from workers.file_access import FileAccess
from workers.models.listing import FoundModels, find_models
from workers.models.remote import hub_cache

__all__ = ["Limits", "Preflight", "PreflightProcess", "check_request", "default_access", "search_models"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Validators are started when they are needed; each takes about 0.7 GB of memory.
NUM_VALIDATORS = 3

# Most waiting requests of one client, and most clients with waiting requests.
MAX_WAITING = 32
MAX_CLIENTS = 64

BODY = "the request's body"


def _memory_share() -> int:
    """Default limit, in bytes, of the memory that the check of one submitted job may use.

    The limit is a quarter of the memory of this machine or container, but at least 2 GiB and at most 8 GiB.
    """
    return max(2 * 2**30, min(total_host_bytes() // 4, 8 * 2**30))


@dataclass(frozen=True)
class Limits:
    """Limits on the checks of one submitted job.

    `time_s` limits the elapsed seconds, `cpu_s` the seconds of processor time, and `memory_bytes` the bytes of memory.
    Processor time and memory are limited only until the checks begin to read the models' weights, because reading the
    weights of large models may take minutes and much memory.
    """

    time_s: float = 900.0
    cpu_s: int = 300
    memory_bytes: int = field(default_factory=_memory_share)


class Preflight(Protocol):
    """Interface of the checks that a submitted job must pass before the server accepts it."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        """Check the body of a request that submits a job of the kind `kind`, and return the accepted job.

        The body `content` is JSON if `is_json`, else YAML. `client` names the sender of the request, so that many
        requests of one client do not delay other clients' requests. `reader` is the account whose rights decide to
        which other jobs the job may refer; if it is None, the job may refer to all jobs. Raises InvalidStudy with every
        problem, and Unavailable if no check is possible at the moment.
        """

    async def check_benchmarks(
        self, document: Mapping[str, Any], stored: JobRecord, *, client: str = "", reader: Account | None = None
    ) -> None:
        """Check the benchmarks that a client wants to add to a stored study.

        `stored` is the server's record of the study. `document` is the study file with the new benchmarks added.
        `client` names the sender of the request, so that many requests of one client do not delay other clients'
        requests. `reader` is the sender's account; None if the server has no accounts. Raises InvalidStudy with every
        problem, and Unavailable if no check is possible at the moment.
        """

    async def check_enqueued(
        self,
        stored: JobRecord,
        label: str,
        *,
        recipe: Mapping[str, Any] | None = None,
        configuration: Mapping[str, Any] | None = None,
        client: str = "",
    ) -> Mapping[str, Any] | None:
        """Check a merge that a client enqueues in a stored study (`service.studies.enqueued.check_enqueued`).

        `stored` is the server's record of the study. `label` is the label of the new trial. The merge is either
        `recipe`, the content of a recipe or of a mergekit configuration, or `configuration`, a value for each parameter
        of the search space. `client` names the sender of the request, so that many requests of one client do not delay
        other clients' requests. Returns the recipe's document; None if a configuration was given. Raises InvalidStudy
        with every problem, and Unavailable if no check is possible at the moment.
        """

    async def mergekit_file(self, stored: JobRecord, recipe: Mapping[str, Any], *, client: str = "") -> str:
        """Convert a recipe of a stored study to mergekit's YAML (`service.studies.mergekit.mergekit_file`).

        `stored` is the server's record of the study, and `recipe` is the document of the recipe. `client` names the
        sender of the request, so that many requests of one client do not delay other clients' requests. Raises
        InvalidStudy with every reason why there is no such file, and Unavailable if the file cannot be computed at the
        moment.
        """

    async def find_models(
        self, *, under: str | None, text: str | None, limit: int, client: str = "", reader: Account | None = None
    ) -> FoundModels:
        """Find models in the directories that jobs of the account `reader` may read.

        `under` is a directory to search in place of these directories. `text` is a text that a model's name, directory
        or architecture must contain. None stands for no such restriction. `limit` is the largest number of models to
        return. `reader` is None at a server without accounts. `client` names the sender of the request, so that many
        requests of one client do not delay other clients' requests. Raises InvalidQuery if `under` cannot be searched,
        and Unavailable if no search is possible at the moment.
        """

    async def engine_dtype(self, stored: JobRecord, *, client: str = "") -> str:
        """Dtype, such as "bfloat16", in which inference engines hold the merged weights of a study.

        `stored` is the server's record of the study. `client` names the sender of the request, so that many requests of
        one client do not delay other clients' requests.
        """


class PreflightProcess:
    """Implementation of `Preflight` that runs the checks of submitted jobs in separate processes, the validators.

    - `context`: the files that jobs may read, and the earlier jobs that they may refer to; None means all files and no
      jobs
    - `cluster`: calls functions on nodes of the Ray cluster; None if jobs run on this machine
    - `limits`: the limits of the checks of one request; None means `Limits()`
    - `num_validators`: the number of validators; if there are several, one client can use all of them except one
    """

    def __init__(
        self,
        context: RequestContext | None = None,
        *,
        cluster: NodeCalls | None = None,
        limits: Limits | None = None,
        num_validators: int = NUM_VALIDATORS,
    ) -> None:
        self._context = context or RequestContext()
        self._cluster = cluster
        self._limits = limits or Limits()
        self._queue = FairQueue(num_validators, max_waiting=MAX_WAITING, max_clients=MAX_CLIENTS)
        self._validators = [WorkerProcess(f"validator {number}", warm_up=_warm_up) for number in range(num_validators)]
        self._idle = list(reversed(self._validators))

    @property
    def pid(self) -> int | None:
        """Process id of the first validator, a process that runs checks; None while this validator is not running."""
        return self._validators[0].pid

    def start(self) -> None:
        self._validators[0].start()

    def stop(self) -> None:
        for validator in self._validators:
            validator.stop()

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        async with self._queue.turn(client):
            context, node, cluster = self._context_of(reader), None, self._cluster
            if cluster is not None:
                node, machines = await self._waited(_place(cluster))
                context = replace(context, machines=machines)
            if cluster is None or node is None:
                async with self._validator() as validator:
                    return await self._limited(
                        validator.call, check_request, content, kind.noun, kind.accept, context, is_json=is_json
                    )
            # The head finds the database itself, as drivers there do: its URL may hold a password.
            context = replace(context, store_url=None)
            on_node = partial(cluster.call, node=node)
            call = self._limited(on_node, check_request, content, kind.noun, kind.accept, context, is_json=is_json)
            return await self._waited(call)

    async def check_benchmarks(
        self, document: Mapping[str, Any], stored: JobRecord, *, client: str = "", reader: Account | None = None
    ) -> None:
        await self._of_models(client, check_added, document, stored, self._context_of(reader).access)

    async def check_enqueued(
        self,
        stored: JobRecord,
        label: str,
        *,
        recipe: Mapping[str, Any] | None = None,
        configuration: Mapping[str, Any] | None = None,
        client: str = "",
    ) -> Mapping[str, Any] | None:
        given = {"recipe": recipe, "configuration": configuration}
        return await self._of_models(client, check_enqueued, stored, label, **given)

    async def mergekit_file(self, stored: JobRecord, recipe: Mapping[str, Any], *, client: str = "") -> str:
        return await self._of_models(client, mergekit_file, stored, recipe, has_directories=False)

    async def find_models(
        self, *, under: str | None, text: str | None, limit: int, client: str = "", reader: Account | None = None
    ) -> FoundModels:
        access = self._context_of(reader).access
        return await self._of_models(client, search_models, access, under=under, text=text, limit=limit)

    async def _of_models(self, client: str, function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
        """Call `function`, which opens models, on the node of the Ray cluster that checks jobs, if there is one.

        Otherwise it is called in a validator process on this machine. `client` names the sender of the request.
        """
        async with self._queue.turn(client):
            node = None if self._cluster is None else (await self._waited(_place(self._cluster)))[0]
            if self._cluster is None or node is None:
                async with self._validator() as validator:
                    return await self._limited(validator.call, function, *args, **kwargs)
            on_node = partial(self._cluster.call, node=node)
            return await self._waited(self._limited(on_node, function, *args, **kwargs))

    async def engine_dtype(self, stored: JobRecord, *, client: str = "") -> str:
        async with self._queue.turn(client), self._validator() as validator:
            return await self._limited(validator.call, _engine_dtype, stored)

    def _context_of(self, reader: Account | None) -> RequestContext:
        """Context (readable files and earlier jobs) for checking a job of the account `reader`.

        A user may refer to other jobs only by their ids, because the user's rights on another job are checked by its
        id. Therefore the checked job may not name paths in the data directory, where the files of other jobs are. If
        `reader` is None, the job may name these paths.
        """
        context = self._context
        if reader is None:
            return context
        access = context.access
        if access is not None and context.data_dir is not None:
            access = replace(access, closed=(str(context.data_dir.resolve()),))
        return replace(context, reader=reader, access=access)

    async def _limited(self, call: Callable[..., Awaitable[Result]], *args: Any, **kwargs: Any) -> Result:
        """Run a check of a request by calling `call` with `args`, `kwargs` and this object's limits.

        `call` runs the check in another process. If this process dies, the check is repeated once. Raises InvalidStudy
        if the check exceeds a limit, and Unavailable if the process dies again.
        """
        limits = CallLimits(self._limits.cpu_s, self._limits.memory_bytes)
        again = partial(call, *args, timeout_s=self._limits.time_s, limits=limits, **kwargs)
        try:
            try:
                return await again()
            except ProcessDied:  # perhaps because of an earlier request
                return await again()
        except ProcessDied as error:
            raise Unavailable(f"the request could not be checked ({error}); try again") from error
        except TimeoutError as error:
            raise _too_much(f"{self._limits.time_s:g} s") from error
        except LimitExceeded as error:
            raise _too_much(str(error)) from error

    async def _waited(self, answer: Awaitable[Result]) -> Result:
        """Await `answer`, a result from the Ray cluster, and return the result. An OSError is raised as Unavailable."""
        try:
            return await answer
        except OSError as error:
            raise Unavailable(f"the request could not be checked on the cluster ({error}); try again") from error

    @asynccontextmanager
    async def _validator(self) -> AsyncIterator[WorkerProcess]:
        validator = self._idle.pop()
        try:
            yield validator
        finally:
            self._idle.append(validator)
            self._idle.sort(key=self._validators.index, reverse=True)


def default_access(data_dir: Path) -> FileAccess:
    """Files that jobs may read by default: files in `data_dir`, the working directory and the hub's cache directory."""
    return FileAccess(tuple(map(str, (data_dir.resolve(), Path.cwd(), hub_cache()))))


async def _place(cluster: NodeCalls) -> tuple[Node | None, tuple[EngineMachines, ...]]:
    """Find the node of the Ray cluster that checks jobs, and the machines that can run inference engines.

    The node is None if jobs are checked on this machine. The call runs in a thread of its own. Raises ConnectionError
    if there is no answer after ANSWER_S seconds.
    """
    with anyio.move_on_after(ANSWER_S):
        return await anyio.to_thread.run_sync(cluster.place, abandon_on_cancel=True, limiter=limiter(Work.RAY))
    raise ConnectionError(f"Ray's dashboard did not answer within {ANSWER_S:g} s")


def _too_much(limit: str) -> InvalidStudy:
    message = (
        f"checking the job takes more than {limit}, the limit for one request; name smaller models or task data. "
        "Weights that were read are remembered: for large models, send the job again, or first run "
        "`mergesearch run STUDY --check` with its study file on the server's machine, which has no limit"
    )
    return InvalidStudy((Problem("", message),))


# Run in the separate process.


def _warm_up() -> None:
    import lm_eval.tasks
    import torch
    import transformers

    del lm_eval, torch, transformers


def check_request(content: bytes, noun: str, accept: Accept, context: RequestContext, *, is_json: bool) -> Accepted:
    """Check the body of a request that submits a job, and return the accepted job; runs in a validator process.

    The body `content` is JSON if `is_json`, else YAML. The function `accept` does the checks of the job's kind, and
    `noun` is the word for such a job in error messages. `context` says which files the job may read, and to which jobs
    it may refer. Raises InvalidStudy with every problem.

    The process has limits of memory and processor time. They are lifted when the checks begin to read the weights of
    models, or to write merges of other studies that the job names as sources, because large models need more than the
    limits.
    """
    try:
        return accept(parse_document(content, BODY, is_json=is_json), replace(context, lift_limits=lift_limits))
    except (InvalidStudy, MemoryError):
        raise
    except RecursionError as error:
        raise InvalidStudy((Problem("", f"{BODY}: is nested too deeply"),)) from error
    except Exception as error:  # the job's driver runs the same checks and would fail too
        logger.exception("a %s could not be checked", noun)
        message = f"the {noun} could not be checked: {type(error).__name__}: {error}"
        raise InvalidStudy((Problem("", message),)) from error


def search_models(access: FileAccess | None, **options: Any) -> FoundModels:
    """Find models by the function `find_models` of `workers.models.listing`, with the same arguments.

    Raises InvalidQuery if the directory to search cannot be searched.
    """
    try:
        return find_models(access, **options)
    except (PermissionError, NotADirectoryError) as error:
        raise InvalidQuery("under", str(error)) from error


def _engine_dtype(stored: JobRecord) -> str:
    return engine_dtype(Study.model_validate(stored.document), ResolvedStudy.of(stored))
