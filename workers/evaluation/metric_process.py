"""Computation of metrics in a separate process, where timers work and a crash does not affect the engine.

The class `TaskProcess` is the base class of `MetricProcess` and `confined_task.ConfinedTask`. The code of the process
is in the module `task_server`. Metrics that set timers need the main thread of a process.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import IO, Any

from workers.errors import EngineUnavailable, InvalidTask, MetricFailed, WorkerError
from workers.evaluation.built_tasks import Answers, BuiltTask
from workers.evaluation.channel import Channel
from workers.evaluation.confinement import Confinement, ending
from workers.evaluation.metrics import Documents, failure
from workers.evaluation.task_server import serve

__all__ = ["MetricProcess", "TaskProcess"]

log = logging.getLogger(__name__)

# lm-eval's MATH tasks have limits of their own: 5 s, up to four times a sample.
SAMPLE_LIMIT_S = 60.0
# Seconds to start the process and to build a task, which may index lm-eval's tasks and read a large dataset.
TASK_LIMIT_S = 600.0
SHOWN = 2000  # last characters of what an ended process wrote to its standard error

PROGRAM = f"from {serve.__module__} import serve; serve()"


class TaskProcess(ABC):
    """Client of a separate process that builds tasks and computes the metrics of answers.

    The process is replaced by a new process if it ends, or if computing the metric of a sample takes longer than
    `sample_limit_s` seconds. The new process computes the missing values sample by sample. If it also ends or takes too
    long, MetricFailed is raised for the sample at which this happens.

    The process is killed by the method `stop`, and when this object is garbage-collected. Building a task may take
    `task_limit_s` seconds. Only one thread may use the object at a time. Linux kills the process when the thread that
    started it ends.
    """

    def __init__(self, *, sample_limit_s: float, task_limit_s: float) -> None:
        self._sample_limit_s = sample_limit_s
        self._task_limit_s = task_limit_s

    @property
    def pid(self) -> int:
        return self._process.pid

    def stop(self) -> str:
        """Kill the process, and return how it ended, as text: its exit code or signal.

        The method may be called twice.
        """
        self._end()
        code = self._process.returncode
        return ending(code if self._confined_by is None else self._confined_by.exit_code(code))

    def _start(
        self,
        first: object,
        *,
        environment: Mapping[str, str],
        confinement: Confinement | None = None,
        handles: Sequence[int] = (),
    ) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (closed by _end)
        with theirs:
            command = [sys.executable, "-c", PROGRAM, str(theirs.fileno())]
            environment = {**environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
            if confinement is not None:
                command, environment = confinement.command(command, environment)
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno(), *handles],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env=environment,
            )
        self._is_distrusted = False
        self._confined_by = confinement
        self._end = weakref.finalize(self, _end, self._process, self._channel, self._errors)
        self._send(first)

    def _values(self, digest: str, task: BuiltTask, answers: Sequence[Answers]) -> list[float]:
        """Compute the metric of `task` for each of several samples; `digest` names the task to the process.

        `answers` has the model's answers to each sample. All values are finite. If the process ends or hangs, it is
        replaced once by a new process, which computes the missing values. Raises MetricFailed if the metric fails,
        InvalidTask if the process cannot build the task, and EngineUnavailable if the new process, too, ends or hangs
        while it builds the task.
        """
        values: list[float] = []
        is_retry = False
        while True:
            is_built = False
            # The second time sample by sample, so that the error names the right one.
            try:
                self._send(("values", digest, answers[len(values) :], is_retry))
                self._receive("ready", self._task_limit_s)
                is_built = True
                while len(values) < len(answers):
                    values += self._numbers(self._receive("values", self._sample_limit_s))
                return values[: len(answers)]
            except (EOFError, ConnectionError, TimeoutError) as error:
                how = self._restart()
                what = str(error) if isinstance(error, TimeoutError) else f"ended its process ({how})"
                if is_retry and not is_built:
                    raise EngineUnavailable(f"building task {task.spec.task!r} for its metric {what}, twice") from None
                if is_retry:
                    raise failure(task, answers[len(values)], f"{what}, twice") from None
            is_retry = True

    def _restart(self) -> str:
        """Replace the process, which has ended or hangs, by a new process that has the same tasks.

        Returns how the old process ended: its exit code or signal.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):  # the connection closes just before the process ends
            self._process.wait(timeout=0.5)
        words = self._last_words()
        how = self.stop()
        log.warning("the process that computes metrics (%d) is replaced: %s%s", self.pid, how, words)
        self._start_again()
        return how

    @abstractmethod
    def _start_again(self) -> None:
        """Start the process again, and give it the tasks that the earlier process had."""

    def _last_words(self) -> str:
        """End of the text that the process has written to its standard error, for messages."""
        size = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, size - SHOWN))
        text = self._errors.read(SHOWN).decode(errors="replace").strip()
        return f"\n{text}" if text else ""

    def _distrust(self) -> None:
        """Kill the process because it sent a message of a wrong form.

        A new process is started before the next message is sent to it.
        """
        self._process.kill()
        self._is_distrusted = True

    def _send(self, message: object) -> None:
        if self._is_distrusted:
            self._restart()
        with contextlib.suppress(ConnectionError):  # the process has ended, which reading its reply shows
            self._channel.send(pickle.dumps(message), limit_s=self._task_limit_s)

    def _receive(self, key: str, limit_s: float) -> Any:
        """Wait for the process's reply, and return the reply's field `key`.

        If the reply has an error instead, the error is raised. The process may ask questions before it replies; they
        are answered here. Raises TimeoutError if a message does not arrive within `limit_s` seconds.
        """
        while True:
            try:
                text = self._channel.receive(limit_s=limit_s, meanwhile=self._check)
                reply = json.loads(text)
                if not isinstance(reply, dict):
                    raise ValueError(f"what is no reply: {text[:100]!r}")
                if "error" in reply:
                    kind, message, field = map(str, reply["error"])
                elif key in reply:
                    return reply[key]
                else:
                    self._send(self._answer(reply))
                    continue
            except TimeoutError:
                raise TimeoutError(f"did not end within {limit_s:g} s") from None
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                if isinstance(error, WorkerError):
                    raise
                self._distrust()
                raise InvalidTask(f"the process of the task sent {error}") from None
            raise self._error(kind, message, field)

    def _numbers(self, reply: Any) -> list[float]:
        try:
            return [float(value) for value in reply]
        except (TypeError, ValueError) as error:
            self._distrust()
            raise InvalidTask(f"the process of the task sent what are no values: {error}") from None

    def _answer(self, question: Mapping[str, Any]) -> object:
        raise ValueError(f"what is no reply: {', '.join(question)}")

    @abstractmethod
    def _check(self) -> None:
        """Check that the process does not misuse resources, such as space on disk; raise a WorkerError if it does.

        The method is called about once a second while a reply of the process is awaited.
        """

    def _error(self, kind: str, message: str, field: str) -> WorkerError:
        return MetricFailed(message) if kind == "MetricFailed" else InvalidTask(message, field)


class MetricProcess(TaskProcess):
    """A separate process that computes metrics of tasks without code of their own (interface `metrics.Metrics`).

    The process is started at once. It has no sandbox, and has the environment variables of its parent. The metric of a
    sample may take `sample_limit_s` seconds, and building a task may take `task_limit_s` seconds.
    """

    def __init__(self, *, sample_limit_s: float = SAMPLE_LIMIT_S, task_limit_s: float = TASK_LIMIT_S) -> None:
        super().__init__(sample_limit_s=sample_limit_s, task_limit_s=task_limit_s)
        self._tasks: dict[str, tuple[BuiltTask, Documents]] = {}
        self._start_again()

    def open(self, task: BuiltTask, documents: Documents) -> None:
        """Send a task and its documents to the process, without waiting until the process has built the task.

        Raises InvalidTask if the documents cannot be sent.
        """
        self._tasks[task.spec.digest] = task, documents
        self._send_task(task, documents)

    def close(self, digest: str) -> None:
        if self._tasks.pop(digest, None) is not None:
            self._send(("close", digest))

    def values(self, digest: str, answers: Sequence[Answers]) -> list[float]:
        """A task's metric for each of several samples, in the order of `answers`; all values are finite.

        `digest` names the task, which the method `open` has sent before. If the process ends or hangs, it is replaced
        once by a new process, which computes the missing values. Raises MetricFailed if the metric fails, InvalidTask
        if the process cannot build the task, and EngineUnavailable if the new process, too, ends or hangs while it
        builds the task.
        """
        return self._values(digest, self._tasks[digest][0], answers)

    def _start_again(self) -> None:
        self._start(None, environment=os.environ)
        for task, documents in self._tasks.values():
            self._send_task(task, documents)

    def _check(self) -> None:
        """Do nothing: the process runs no code of tasks, and so cannot misuse resources."""

    def _send_task(self, task: BuiltTask, documents: Documents) -> None:
        try:
            self._send(("open", task.spec, documents))
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # documents may be objects of any class
            raise InvalidTask(
                f"task {task.spec.task!r}: its documents cannot be sent to the process that computes metrics: {error}"
            ) from error


def _end(process: subprocess.Popen[bytes], channel: Channel, errors: IO[bytes]) -> None:
    channel.close()
    errors.close()
    process.kill()
    process.wait()
