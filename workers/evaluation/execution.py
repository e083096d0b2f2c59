"""Execution of programs that a model wrote, each in a separate confined process.

A program passes if it runs to its end without an error. A program can fake its own success, because tests and answer
run in one process, as in the published harnesses. A program cannot change the outcome of another program.
"""

from __future__ import annotations

import contextlib
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
from workers.evaluation.available_confinement import available_confinement
from workers.evaluation.channel import Channel
from workers.evaluation.confinement import MIB, Confinement
from workers.evaluation.execution_server import WALL_FACTOR, ExecutionStart, serve
from workers.evaluation.system_calls import ConfinementUnavailable

__all__ = ["CPU_S", "Executor", "pass_at_k"]

CPU_S = 3  # processor time of a program by default; tests of most published benchmarks take milliseconds
MEMORY = 2048 * MIB  # address space of a program
START_S = 120.0
PROGRAM = f"from {serve.__module__} import serve; serve()"


class Executor:
    """Client of a separate process that executes Python programs, several at a time, each in a sandbox.

    A program can read the installed packages and the libraries of the system, and can write no file. A program has
    `cpu_s` seconds of processor time (default CPU_S). `confinement` replaces this machine's sandbox in tests.
    `enforced` names the mechanisms that confine programs.

    Only one thread may use the object at a time. Linux kills the process when the thread that started it ends. Raises
    InvalidTask if this machine cannot confine a program.
    """

    def __init__(self, *, cpu_s: int | None = None, confinement: Callable[..., Confinement] | None = None) -> None:
        self._cpu_s = CPU_S if cpu_s is None else cpu_s
        try:
            means = confinement or available_confinement()
        except ConfinementUnavailable as error:
            raise _unavailable(str(error)) from error
        self._start = ExecutionStart(
            means(memory_bytes=MEMORY, file_bytes=0, cpu_s=self._cpu_s),
            num_parallel=len(os.sched_getaffinity(0)),
            wall_factor=WALL_FACTOR,
        )
        self._submitted: list[str] = []
        self._begin()

    @property
    def pid(self) -> int:
        return self._process.pid

    def submit(self, programs: Sequence[str]) -> None:
        """Submit programs for execution, and return at once."""
        self._submitted += programs
        with contextlib.suppress(OSError):  # the process has ended, which `outcomes` finds out
            self._channel.send(pickle.dumps(list(programs)), limit_s=START_S)

    def outcomes(self) -> list[str | None]:
        """Wait for all programs submitted since the last call, and return the outcome of each.

        An outcome is None if the program ran to its end, else the reason why it did not. Outcomes are in the order of
        submission. If the separate process that starts programs ends, it is started again once, and all programs are
        executed again. Raises EngineUnavailable if the new process does not start, or ends as well.
        """
        programs, self._submitted = self._submitted, []
        limit_s = START_S + WALL_FACTOR * self._cpu_s * len(programs)
        for is_last in (False, True):
            try:
                self._channel.send(pickle.dumps(None), limit_s=limit_s)
                reply = json.loads(self._channel.receive(limit_s=limit_s))
                if "failed" in reply:
                    raise EOFError(f"a program could not be confined: {reply['failed']}")
                found = reply["reasons"]
                if len(found) != len(programs):
                    raise EOFError(f"{len(found)} outcomes of {len(programs)} programs")
                return [None if reason is None else str(reason) for reason in found]
            except (EOFError, OSError) as error:
                self.close()
                if is_last:
                    raise EngineUnavailable(f"the process that executes programs ended twice: {error!r}") from error
                try:
                    self._begin()
                except InvalidTask as unable:  # this machine could confine programs before
                    raise EngineUnavailable(str(unable)) from error
                with contextlib.suppress(OSError):
                    self._channel.send(pickle.dumps(programs), limit_s=limit_s)
        raise AssertionError

    def run(self, programs: Sequence[str]) -> list[str | None]:
        """Execute programs, wait for them, and return the outcome of each, in their order.

        An outcome is None if the program ran to its end, else the reason why it did not. The method calls the method
        `submit`, then the method `outcomes`.
        """
        self.submit(programs)
        return self.outcomes()

    def drop(self) -> None:
        """Kill all submitted programs, and discard their outcomes.

        Further programs may be submitted afterwards.
        """
        self._submitted = []
        self.close()
        with contextlib.suppress(EngineUnavailable, InvalidTask):  # `outcomes` tries again
            self._begin()

    def close(self) -> None:
        """Kill the separate process that executes programs, with all running programs. May be called twice."""
        if "_end" in self.__dict__:
            self._end()

    def _begin(self) -> None:
        """Start the process that executes programs.

        Raises EngineUnavailable if the process does not start, and InvalidTask if it cannot restrict programs to a
        sandbox.
        """
        try:
            self._start_process()
        except (EOFError, OSError) as error:
            self.close()
            raise EngineUnavailable(f"the process that executes programs did not start: {error!r}") from error

    def _start_process(self) -> None:
        ours, theirs = socket.socketpair()
        self._channel = Channel(ours)
        environment = {name: os.environ[name] for name in ("LANG", "PATH", "TZ") if name in os.environ}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={
                    **environment,
                    "PYTHONPATH": os.pathsep.join(sys.path),
                    "PYTHONHASHSEED": "0",  # the order of a set is the same each time
                    "OMP_NUM_THREADS": "1",
                    "HOME": "/",
                },
            )
        self._end = weakref.finalize(self, _end, self._process, self._channel)
        self._channel.send(pickle.dumps(self._start), limit_s=START_S)
        reply = json.loads(self._channel.receive(limit_s=START_S))
        if "error" in reply:
            self.close()
            raise _unavailable(reply["error"])
        self.enforced = str(reply["enforced"])


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased estimate of pass@k, the probability that at least one of `k` samples passes.

    The estimate is made from `num_samples` samples, of which `num_passed` passed; `k` is at most `num_samples`. The
    estimate is equation 1 of Chen et al., "Evaluating Large Language Models Trained on Code" (arXiv:2107.03374).
    """
    if num_samples - num_passed < k:
        return 1.0
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def _unavailable(why: str) -> InvalidTask:
    return InvalidTask(
        f"what a model writes is executed only in a confined process, and this machine cannot confine one: {why}"
    )


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    process.kill()
    process.wait()
