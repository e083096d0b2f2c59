"""Checks of submitted jobs in separate processes, the validators, with limits of time and memory.

The checks import torch and lm-eval and read models. They run outside the server's process, with limits of elapsed time,
processor time and memory. Therefore no request's body can stop the server, and no client can stop the requests of
another client. If jobs run on other machines, the checks run on the head of their cluster (`NodeCalls.place`).
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
from service.jobs.base import Accept, Accepted, JobKind, RequestContext
from service.jobs.registry import kind_of
from service.studies.benchmarks import check_added
from service.studies.preflight.dtype import engine_dtype
from service.types import Account, JobRecord
from service.worker_process import CallLimits, LimitExceeded, ProcessDied, WorkerProcess, lift_limits
from workers.engines.host_memory import total_host_bytes
from workers.file_access import FileAccess
from workers.models.remote import hub_cache

__all__ = ["Limits", "Preflight", "PreflightProcess", "check_on_node", "check_request", "default_access"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Validators are started when they are needed; each takes about 0.7 GB of memory.
NUM_VALIDATORS = 3

# Most waiting requests of one client, and most clients with waiting requests.
MAX_WAITING = 32
MAX_CLIENTS = 64

BODY = "the request's body"


def _memory_share() -> int:
    """Default limit, in bytes, of the memory that checking one request may use.

    It is a quarter of this machine's or container's memory, but at least 2 GiB and at most 8 GiB.
    """
    return max(2 * 2**30, min(total_host_bytes() // 4, 8 * 2**30))


@dataclass(frozen=True)
class Limits:
    """Limits on the checks of one request: elapsed seconds, seconds of processor time, and bytes of memory.

    Processor time and memory are limited only until the models' weights are read. Reading the weights of large models
    for the first time takes minutes and maps all of their files.
    """

    time_s: float = 900.0
    cpu_s: int = 300
    memory_bytes: int = field(default_factory=_memory_share)


class Preflight(Protocol):
    """Interface of the checks that jobs in requests must pass before the server accepts them."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    async def accept(
        self, content: bytes, *, is_json: bool, kind: JobKind, client: str = "", reader: Account | None = None
    ) -> Accepted:
        """Check the body of a request that describes a job of the kind `kind`.

        The body `content` is JSON if `is_json`, else YAML. `client` names the sender. Many requests of one client do
        not delay the requests of other clients. `reader` has the sender's rights, with which the job may refer to other
        jobs; None is every right. Raises InvalidStudy with every problem, and Unavailable if no check is possible at
        the moment.
        """

    async def check_benchmarks(
        self, document: Mapping[str, Any], stored: JobRecord, *, client: str = "", reader: Account | None = None
    ) -> None:
        """Check the benchmarks that a client wants to add to a stored study.

        `stored` is the server's record of the study. `document` is the study file with the new benchmarks added.
        `client` names the sender, and `reader` has its rights. Raises InvalidStudy with every problem, and Unavailable
        if no check is possible at the moment.
        """

    async def engine_dtype(self, document: Mapping[str, Any], *, client: str = "") -> str:
        """Dtype in which inference engines hold the merged weights of a study.

        `document` is the study file, and `client` names the sender.
        """


class PreflightProcess:
    """Checker of submitted jobs (`Preflight`) that runs the checks in separate processes.

    - `context`: the files that jobs may read, and the earlier jobs that they may refer to; None means all files and no
      jobs
    - `cluster`: calls functions on nodes of the cluster; None if jobs run on this machine
    - `limits`: the limits of the checks of one request; None means `Limits()`
    - `num_validators`: the number of processes that do the checks; at most `num_validators` - 1 of these processes, but
      at least one, work for one client at a time
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
        """Process id of the first validator process; None while it is not running."""
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
            call = self._limited(on_node, check_on_node, content, kind.name, context, is_json=is_json)
            return await self._waited(call)

    async def check_benchmarks(
        self, document: Mapping[str, Any], stored: JobRecord, *, client: str = "", reader: Account | None = None
    ) -> None:
        async with self._queue.turn(client):
            node, cluster, access = None, self._cluster, self._context_of(reader).access
            if cluster is not None:
                node, _ = await self._waited(_place(cluster))
            if cluster is None or node is None:
                async with self._validator() as validator:
                    await self._limited(validator.call, check_added, document, stored, access)
            else:
                on_node = partial(cluster.call, node=node)
                await self._waited(self._limited(on_node, check_added, document, stored, access))

    async def engine_dtype(self, document: Mapping[str, Any], *, client: str = "") -> str:
        async with self._queue.turn(client), self._validator() as validator:
            return await self._limited(validator.call, _engine_dtype, document)

    def _context_of(self, reader: Account | None) -> RequestContext:
        """Context for checking a job that `reader` submits.

        A user may refer to other jobs only by their ids, because the user's rights on a job are checked by its id.
        Therefore the job may not name paths in the data directory, where the files of other jobs are. If `reader` is
        None, there is no such limit.
        """
        context = self._context
        if reader is None:
            return context
        access = context.access
        if access is not None and context.data_dir is not None:
            access = replace(access, closed=(str(context.data_dir.resolve()),))
        return replace(context, reader=reader, access=access)

    async def _limited(self, call: Callable[..., Awaitable[Result]], *args: Any, **kwargs: Any) -> Result:
        """Await `call` with the given arguments, within the limits on the checks of one request.

        If the process of the call dies, the call is repeated once.
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
        """Await a result from the Ray cluster. Raises Unavailable if the cluster does not answer."""
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
    """Files that jobs may read by default: all files in `data_dir`, the working directory and the hub's cache."""
    return FileAccess(tuple(map(str, (data_dir.resolve(), Path.cwd(), hub_cache()))))


async def _place(cluster: NodeCalls) -> tuple[Node | None, tuple[EngineMachines, ...]]:
    """Call `NodeCalls.place`, which selects the node on which jobs are checked, in a thread, and await the result.

    Raises ConnectionError if there is no result after ANSWER_S seconds.
    """
    with anyio.move_on_after(ANSWER_S):
        return await anyio.to_thread.run_sync(cluster.place, abandon_on_cancel=True)
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
    """Check the body of a request that describes a job.

    The body `content` is JSON if `is_json`, else YAML. The function `accept` does the checks of the job's kind, and
    `noun` is the word for such a job in messages. `context` says which files the job may read.

    The limits of memory and processor time are lifted (`lift_limits`) before weights are read, and before merges of
    other studies are written. The sender does not choose the amount of this work, and reading large weights maps all of
    their files. Raises InvalidStudy with every problem.
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


def check_on_node(content: bytes, kind: str, context: RequestContext, *, is_json: bool) -> Accepted:
    """Check the body of a request on a node of the Ray cluster.

    `kind` is the name of the job's kind. The other arguments and the errors are those of `check_request`.
    """
    declared = kind_of(kind)
    return check_request(content, declared.noun, declared.accept, context, is_json=is_json)


def _engine_dtype(document: Mapping[str, Any]) -> str:
    return engine_dtype(Study.model_validate(document))
