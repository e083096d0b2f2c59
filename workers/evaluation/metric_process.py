"""Metrics in a separate process, where they have the main thread: timers work, and no metric can harm the engine.

The process builds each task from its TaskSpec. The documents are sent once per task, as lm-eval left them when it built
the requests. After that only answers and values pass between the processes.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from workers.errors import EngineUnavailable, InvalidTask, WorkerError
from workers.evaluation.metrics import Answers, Documents, LocalMetrics, failure
from workers.evaluation.tasks import BuiltTask, build_task
from workers.types import TaskSpec

__all__ = ["MetricProcess", "serve"]

log = logging.getLogger(__name__)

# lm-eval's MATH tasks have limits of their own: 5 s, up to four times a sample.
SAMPLE_LIMIT_S = 60.0
# Seconds to start the process and to build a task, which may index lm-eval's tasks and read a large dataset.
TASK_LIMIT_S = 600.0
# Values that are sent together: waking the other process for each takes longer than most metrics.
SEND_EVERY_S = 0.1

PROGRAM = f"from {__name__} import serve; serve()"
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class MetricProcess:
    """A separate process that computes metrics of answers (`metrics.Metrics`).

    The process is started at once, and started again after it has ended. MetricFailed is raised for a sample whose
    metric twice takes longer than `sample_limit_s` or twice ends the process. Building a task may take `task_limit_s`
    seconds. Only one thread may use the object at a time. Linux kills the process when the thread that started it ends.
    """

    def __init__(self, *, sample_limit_s: float = SAMPLE_LIMIT_S, task_limit_s: float = TASK_LIMIT_S) -> None:
        self._sample_limit_s = sample_limit_s
        self._task_limit_s = task_limit_s
        self._tasks: dict[str, tuple[BuiltTask, Documents]] = {}
        self._start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def open(self, task: BuiltTask, documents: Documents) -> None:
        """Send a task and its documents to the process, without waiting until the process has built the task.

        Raises InvalidTask if the documents cannot be sent.
        """
        self._tasks[task.spec.digest] = task, documents
        self._send_task(task, documents)

    def close(self, digest: str) -> None:
        if self._tasks.pop(digest, None) is not None:
            self._send(pickle.dumps(("close", digest)))

    def values(self, digest: str, answers: Sequence[Answers]) -> list[float]:
        """The values of a task's metric for samples, in the order of `answers`; all are finite.

        `digest` names the task, which the method `open` has sent before. Raises MetricFailed if the metric fails,
        InvalidTask if the process cannot build the task, and EngineUnavailable if the process ends or hangs twice while
        it builds the task.
        """
        task = self._tasks[digest][0]
        values: list[float] = []
        is_retry = False
        while True:
            is_built = False
            # The second time sample by sample, so that the error names the right one.
            self._send(pickle.dumps(("values", digest, answers[len(values) :], is_retry)))
            try:
                self._receive(self._task_limit_s)
                is_built = True
                while len(values) < len(answers):
                    values += self._receive(self._sample_limit_s)
                return values
            except (EOFError, ConnectionError, TimeoutError) as error:
                how = self._restart()
                what = str(error) if isinstance(error, TimeoutError) else f"ended its process ({how})"
                if is_retry and not is_built:
                    raise EngineUnavailable(f"building task {task.spec.task!r} for its metric {what}, twice") from None
                if is_retry:
                    raise failure(task, answers[len(values)], f"{what}, twice") from None
            is_retry = True

    def stop(self) -> str:
        """Kill the process, and return how it ended: its exit code or signal. May be called twice."""
        self._connection.close()
        self._process.kill()
        code = self._process.wait()
        return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            )

    def _restart(self) -> str:
        """Start a new process in place of one that has ended or hangs, and send it all open tasks.

        Returns how the old process ended: its exit code or signal.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):  # the pipe closes just before the process ends
            self._process.wait(timeout=0.5)
        how = self.stop()
        log.warning("the process that computes metrics (%d) is replaced: %s", self.pid, how)
        self._start()
        for task, documents in self._tasks.values():
            self._send_task(task, documents)
        return how

    def _send_task(self, task: BuiltTask, documents: Documents) -> None:
        try:
            message = pickle.dumps(("open", task.spec.digest, task.spec, documents))
        except Exception as error:  # documents may be objects of any class
            raise InvalidTask(
                f"task {task.spec.task!r}: its documents cannot be sent to the process that computes metrics: {error}"
            ) from error
        self._send(message)

    def _send(self, message: bytes) -> None:
        with contextlib.suppress(ConnectionError):  # the process has ended, which reading its reply shows
            self._connection.send_bytes(message)

    def _receive(self, limit_s: float) -> Any:
        if not self._connection.poll(limit_s):
            raise TimeoutError(f"did not end within {limit_s:g} s")
        reply = self._connection.recv()
        if isinstance(reply, Exception):
            raise reply
        return reply


def serve() -> None:
    """Main function of the metric process, which runs until the other end of its pipe closes.

    The only argument on the command line is the file descriptor of this process's end of the pipe. The requests are
    "open" (a task with its documents), "close", and "values". The first reply to "values" is None once the task is
    built; the next replies are lists of values. A task that cannot be built, and a metric that fails, are reported by
    an error as the last reply. Any other error ends the process.
    """
    _prepare_signals()
    connection: Connection[Any, Any] = Connection(int(sys.argv[1]))
    importlib.import_module("lm_eval.tasks")  # takes seconds, while the engine starts
    local = LocalMetrics()
    refused: dict[str, InvalidTask] = {}
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            kind, digest, *rest = connection.recv()
            if kind == "open":
                _open(local, refused, digest, *rest)
            elif kind == "close":
                local.close(digest)
            elif digest in refused:
                connection.send(refused[digest])
            else:
                _answer(connection, local, digest, *rest)


def _prepare_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent's thread may block signals that metrics wait for
    if sys.platform == "linux":  # so that the process also ends when the parent is killed while a metric hangs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _open(
    local: LocalMetrics, refused: dict[str, InvalidTask], digest: str, spec: TaskSpec, documents: Documents
) -> None:
    refused.pop(digest, None)
    try:
        local.open(build_task(spec), documents)
    except InvalidTask as error:
        refused[digest] = error
    except Exception as error:  # a task is code and data of any origin
        refused[digest] = InvalidTask(f"task {spec.task!r}: cannot be built: {type(error).__name__}: {error}")


def _answer(
    connection: Connection[Any, Any],
    local: LocalMetrics,
    digest: str,
    answers: Sequence[Answers],
    one_by_one: bool,
) -> None:
    connection.send(None)
    values: list[float] = []
    sent_at = time.monotonic()
    for each in answers:
        try:
            values.append(local.value(digest, each))
        except WorkerError as error:
            connection.send(values)
            connection.send(error)
            return
        finally:
            signal.alarm(0)  # a timer that a metric has left behind
        if one_by_one or time.monotonic() - sent_at > SEND_EVERY_S:
            connection.send(values)
            values, sent_at = [], time.monotonic()
    if values:
        connection.send(values)
