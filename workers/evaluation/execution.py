"""Execution of programs that a model wrote: each in a process of its own, confined, with limits of time and memory.

A program passes if it runs to its end without an error. It can make that up for itself, as in the published harnesses,
which run tests and answers in one process too; it cannot change the outcome of another program.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence

from workers.errors import EngineUnavailable, InvalidTask
from workers.evaluation.channel import Channel
from workers.evaluation.confinement import MIB, Confinement
from workers.evaluation.execution_server import WALL_FACTOR, ExecutionStart, serve

__all__ = ["CPU_S", "Executor", "pass_at_k"]

CPU_S = 3  # processor time of a program; tests of published benchmarks take milliseconds
MEMORY = 2048 * MIB  # address space of a program
START_S = 120.0
PROGRAM = f"from {serve.__module__} import serve; serve()"


class Executor:
    """A process that executes programs in Python, several at a time, each confined.

    A program reads the packages that are installed and the libraries of the system, and writes no file. `enforced` says
    what confines it. `confinement` is for tests. Only one thread may use the object at a time; Linux kills the process
    when the thread that started it ends. Raises InvalidTask if this machine cannot confine a program.
    """

    def __init__(self, *, confinement: Callable[..., Confinement] = Confinement) -> None:
        self._start = ExecutionStart(
            confinement(memory_bytes=MEMORY, file_bytes=0, cpu_s=CPU_S), num_parallel=len(os.sched_getaffinity(0))
        )
        self._begin()

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, programs: Sequence[str]) -> list[str | None]:
        """Execute programs; for each, None if it ran to its end, or the reason why it did not, in words.

        Raises EngineUnavailable if the process that starts them ends twice.
        """
        limit_s = START_S + WALL_FACTOR * CPU_S * len(programs)
        for is_last in (False, True):
            try:
                self._channel.send(pickle.dumps(list(programs)), limit_s=limit_s)
                found = json.loads(self._channel.receive(limit_s=limit_s))["reasons"]
                return [None if reason is None else str(reason) for reason in found]
            except (EOFError, OSError) as error:
                self.close()
                if is_last:
                    raise EngineUnavailable(f"the process that executes programs ended twice: {error!r}") from error
                self._begin()
        raise AssertionError

    def close(self) -> None:
        """End the process and all programs. May be called twice."""
        self._end()

    def _begin(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        environment = {name: os.environ[name] for name in ("LANG", "PATH", "TZ") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**environment, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "HOME": "/"},
            )
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        self._channel.send(pickle.dumps(self._start), limit_s=START_S)
        reply = json.loads(self._channel.receive(limit_s=START_S))
        if "error" in reply:
            self.close()
            raise InvalidTask(
                f"what a model writes is executed only in a confined process, and this machine cannot confine one: "
                f"{reply['error']}"
            )
        self.enforced = str(reply["enforced"])


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of the probability that one of `k` samples passes, after `num_passed` of `num_samples` did.

    Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374), equation 1.
    """
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    process.kill()
    process.wait()
