"""A separate process for work that must not run in the server: heavy imports, long computations, code that may crash.

The process runs module-level functions with picklable arguments, one call at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import resource
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import anyio
import anyio.to_thread
import psutil

from service.disk import gib
from workers.telemetry import logs

__all__ = ["NO_LIMITS", "CallLimits", "LimitExceeded", "ProcessDied", "WorkerProcess", "lift_limits"]

logger = logging.getLogger(__name__)

# Not forked: the server has threads. A fresh interpreter also shares none of its sockets.
CONTEXT = multiprocessing.get_context("spawn")

# Time that a process has to exit after its pipe was closed.
EXIT_S = 1.0

Result = TypeVar("Result")


class ProcessDied(RuntimeError):
    """Raised if a worker process ended before its call did. The next call starts a new process."""


class LimitExceeded(RuntimeError):
    """Raised if a call exceeded its limit of processor time or memory, which the message names.

    The worker process was ended. The next call starts a new process.
    """


@dataclass(frozen=True)
class CallLimits:
    """Limits of the processor time and memory of one call in a worker process; None means no limit.

    `cpu_s` is the processor time in seconds, summed over all threads. `memory_bytes` is the number of bytes that the
    process may allocate, including files that are mapped for writing.
    """

    cpu_s: int | None = None
    memory_bytes: int | None = None


NO_LIMITS = CallLimits()


class WorkerProcess:
    """Separate process for function calls; it starts at the first call, and again after it has died."""

    def __init__(self, name: str, *, warm_up: Callable[[], None] | None = None) -> None:
        """Prepare a separate process that will run functions; the process is not started yet.

        `name` names the process in messages. `warm_up` is called in the new process before its first function call, for
        example to import modules; None does nothing.
        """
        self._name = name
        self._warm_up = warm_up
        self._turn = asyncio.Lock()
        self._thread = anyio.CapacityLimiter(1)
        self._starting = threading.Lock()
        self._process: BaseProcess | None = None
        self._connection: Connection[Any, Any] | None = None
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """Start the process now instead of at the first call. Returns without waiting until it is ready."""
        self._running()

    def stop(self) -> None:
        """Kill the process; the running call and all later calls raise ProcessDied."""
        with self._starting:
            self._is_stopped = True
            if self._process is not None:
                self._process.kill()
                self._process.join()

    async def call(
        self,
        function: Callable[..., Result],
        *args: Any,
        timeout_s: float | None = None,
        limits: CallLimits = NO_LIMITS,
        **kwargs: Any,
    ) -> Result:
        """Run `function` with the given arguments in the process, and return its result or raise its error.

        `timeout_s` limits the seconds of the call (None: no limit), and `limits` limits its processor time and memory.

        Raises:
            ProcessDied: The process ended before the call did.
            TimeoutError: The call took longer than `timeout_s` seconds; the process was killed.
            LimitExceeded: The call needed more processor time or memory than `limits` allow.
        """
        async with self._turn:
            result: Result = await anyio.to_thread.run_sync(
                self._call, function, args, kwargs, timeout_s, limits, limiter=self._thread
            )
            return result

    def _call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, timeout_s: float | None, limits: CallLimits
    ) -> Any:
        try:
            connection = self._running()
            connection.send((function, args, kwargs, limits))
            if not connection.poll(timeout_s):
                self._end()
                raise TimeoutError(f"{self._name}: no answer within {timeout_s} s")
            is_result, value = connection.recv()
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise
            if self._end(grace_s=EXIT_S) == -signal.SIGXCPU:
                raise LimitExceeded(f"{limits.cpu_s} s of processor time") from error
            raise ProcessDied(f"{self._name}: the process ended before the call did") from error
        if is_result:
            return value
        if isinstance(value, MemoryError):
            self._end()
            size = None if limits.memory_bytes is None else gib(limits.memory_bytes)
            raise LimitExceeded(f"{size} of memory" if size else "the available memory") from value
        raise value

    def _running(self) -> Connection[Any, Any]:
        with self._starting:
            if self._is_stopped:
                raise ProcessDied(f"{self._name}: was stopped")
            # Between calls the process sends nothing: if the pipe is readable, the process has closed it.
            if (
                self._connection is None
                or self._process is None
                or self._connection.poll()
                or not self._process.is_alive()
            ):
                self._connection, child_end = CONTEXT.Pipe()
                arguments = (child_end, self._warm_up)
                self._process = CONTEXT.Process(target=_work, args=arguments, name=self._name, daemon=True)
                self._process.start()
                child_end.close()  # so that the pipe closes when the process dies
            return self._connection

    def _end(self, *, grace_s: float = 0.0) -> int | None:
        """End the process and all processes that it started.

        The processes that it started are killed at once; the process itself is killed after `grace_s` seconds. Returns
        the exit code of the process if it ended by itself before it was killed, else None.
        """
        with self._starting:
            process, self._process = self._process, None
            if process is None:
                return None
            for child in _children(process):
                with contextlib.suppress(psutil.NoSuchProcess):
                    child.kill()
            process.join(grace_s)
            exit_code = process.exitcode
            process.kill()
            process.join()
            logger.warning("%s: process %s has ended", self._name, process.pid)
            return exit_code


def _children(process: BaseProcess) -> list[psutil.Process]:
    try:
        children: list[psutil.Process] = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    return children


def lift_limits() -> None:
    """Remove the limits of processor time and memory from the current process until its current call ends.

    A WorkerProcess sets these limits again at the beginning of each call.
    """
    _limit(resource.RLIMIT_CPU, None)
    _limit(resource.RLIMIT_DATA, None)


def _work(connection: Connection[Any, Any], warm_up: Callable[[], None] | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server handles Ctrl-C and ends this process
    threading.Thread(target=_end_with_parent, daemon=True).start()
    logs.log_in_worker()
    if warm_up is not None:
        warm_up()
    while True:
        try:
            function, args, kwargs, limits = connection.recv()
        except EOFError:
            return
        used_s = int(time.process_time()) + 1
        _limit(resource.RLIMIT_CPU, None if limits.cpu_s is None else used_s + limits.cpu_s)
        _limit(resource.RLIMIT_DATA, limits.memory_bytes)
        try:
            reply = True, function(*args, **kwargs)
        except Exception as error:
            reply = False, _portable(error)
        lift_limits()  # sending the reply and receiving the next call have no limits
        connection.send(reply)


def _limit(kind: int, value: int | None) -> None:
    """Set the soft limit of the current process for a resource, such as processor time, to `value`.

    `kind` is a constant of the module `resource`, such as RLIMIT_CPU. If `value` is None or above the hard limit, the
    soft limit is set to the hard limit.
    """
    _, hard = resource.getrlimit(kind)
    is_free = hard == resource.RLIM_INFINITY
    resource.setrlimit(kind, (hard if value is None else value if is_free else min(value, hard), hard))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _portable(error: Exception) -> Exception:
    try:
        copy = pickle.loads(pickle.dumps(error))
        return error if type(copy) is type(error) else RuntimeError(repr(error))
    except Exception:  # pickling runs the error's own code, which may raise anything
        return RuntimeError(repr(error))
