"""Main function of the process that executes programs, each in a confined child process.

This process runs no program itself and imports no large package, so that forking takes a millisecond. Programs can
access neither this process nor each other.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pickle
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from workers.evaluation.available_confinement import without_packages
from workers.evaluation.bubblewrap import Bubblewrap
from workers.evaluation.channel import Channel
from workers.evaluation.confinement import Confinement, ending
from workers.evaluation.program_process import BEGUN, REASON, run, run_confined, start_message
from workers.evaluation.system_calls import PR_SET_PDEATHSIG, ConfinementUnavailable

__all__ = ["WALL_FACTOR", "ExecutionStart", "serve"]

# A program that waits, or gets no processor, ends after this multiple of its limit of processor time. The limit of
# processor time is the one that decides, because a value must not depend on the machine's load.
WALL_FACTOR = 10
MAX_SAID = 4096  # bytes that a program's process may send; one that sends more is ended


@dataclass(frozen=True)
class ExecutionStart:
    """First message to the process that executes programs.

    `confinement` is the sandbox of each program, and `num_parallel` is the number of programs that run at a time. A
    program whose limit of processor time is t seconds is ended after `wall_factor` x t seconds of real time.
    """

    confinement: Confinement
    num_parallel: int
    wall_factor: float = WALL_FACTOR


@dataclass
class _Running:
    index: int
    pid: int
    token: bytes
    deadline: float
    said: bytes = b""


class NotConfinedError(RuntimeError):
    """Raised if a program's process ended before the sandbox was complete, so that the program did not begin.

    The message has the reason.
    """


def serve() -> None:
    """Execute programs that another process sends, until the other end of the connection closes.

    The only command line argument is the connection's file descriptor. The first message is an ExecutionStart, which
    has the programs' sandbox and the number of programs that run at a time. The reply to it has the names of the
    mechanisms of the sandbox ("enforced"), or the reason why there is none ("error").

    Each further message is a list of programs (texts), which are started as soon as processors are free, or None, which
    asks for the outcomes. The reply to None comes when all programs have ended. This reply has the key "reasons", with
    an entry for each program since the last reply: null if the program ran to its end, else the reason why it did not.
    If a program could not be put into its sandbox, this process replies with the reason ("failed"), and ends.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    connection = socket.socket(fileno=int(sys.argv[1]))
    channel = Channel(connection)
    with contextlib.suppress(EOFError, ConnectionError):
        start: ExecutionStart = pickle.loads(channel.receive())
        with _Programs(start) as programs:
            kind = "error"  # of the reply, if a program cannot be confined
            try:
                programs.add([""])
                while not programs.have_ended:
                    programs.wait()
                reason = programs.reasons()[0]
                reply = {"error": reason} if reason else {"enforced": _enforced(start.confinement)}
                channel.send(json.dumps(reply).encode())
                kind = "failed"
                programs.watch(connection)
                is_asked = False
                while True:
                    if programs.wait():
                        message = pickle.loads(channel.receive())
                        is_asked = message is None
                        programs.add(message or ())
                    if is_asked and programs.have_ended:
                        channel.send(json.dumps({"reasons": programs.reasons()}).encode())
                        is_asked = False
            except NotConfinedError as error:
                channel.send(json.dumps({kind: str(error)}).encode())


class _Programs:
    """Programs of this process, which wait for a processor, are running, or have ended."""

    def __init__(self, start: ExecutionStart) -> None:
        self._confinement = start.confinement
        self._num_parallel = start.num_parallel
        self._cpu_s = start.confinement.cpu_s or 1
        self._wall_s = start.wall_factor * self._cpu_s
        self._reasons: list[str | None] = []
        self._waiting: deque[tuple[int, str]] = deque()
        self._num_running = self._num_started = 0
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> _Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()

    @property
    def have_ended(self) -> bool:
        return not self._waiting and not self._num_running

    def add(self, programs: Sequence[str]) -> None:
        self._waiting.extend(enumerate(programs, start=len(self._reasons)))
        self._reasons += [None] * len(programs)
        self._start_some()

    def reasons(self) -> list[str | None]:
        """The reason why each submitted program did not run to its end, in order; None for a program that did.

        Call this only after all programs have ended. The call also forgets the programs, so that a second call returns
        an empty list.
        """
        found, self._reasons = self._reasons, []
        return found

    def watch(self, connection: socket.socket) -> None:
        """Make the method `wait` return also when a message arrives at the socket `connection`."""
        self._selector.register(connection, selectors.EVENT_READ)

    def wait(self) -> bool:
        """Wait until a program ends or is late, or a message arrives; return whether a message has arrived.

        A program is late when it has reached its time limit. Before the method returns, programs that wait for a
        processor are started in place of programs that have ended.
        """
        running = [key.data for key in self._selector.get_map().values() if key.data]
        limit = min((each.deadline for each in running), default=None)
        ready = {key.fd for key, _ in self._selector.select(limit and max(0.0, limit - time.monotonic()))}
        has_message = False
        for key in list(self._selector.get_map().values()):
            each: _Running | None = key.data
            if each is None:
                has_message = key.fd in ready
            elif key.fd in ready and (piece := os.read(key.fd, MAX_SAID)) and len(each.said) < MAX_SAID:
                each.said += piece
            elif key.fd in ready or time.monotonic() > each.deadline:
                self._selector.unregister(key.fd)
                os.close(key.fd)
                self._num_running -= 1
                self._reasons[each.index] = self._outcome(each, is_late=key.fd not in ready)
        self._start_some()
        return has_message

    def _start_some(self) -> None:
        while self._waiting and self._num_running < self._num_parallel:
            index, program = self._waiting.popleft()
            pipe, pid, token = _started(program, self._confinement.of_program(self._num_started))
            self._num_started += 1
            running = _Running(index, pid, token, time.monotonic() + self._wall_s)
            self._selector.register(pipe, selectors.EVENT_READ, running)
            self._num_running += 1

    def _outcome(self, running: _Running, *, is_late: bool) -> str | None:
        """Return None if a program has run to its end, else the reason why it has not.

        `running` is the program with its process. The process is killed if it still runs, and its exit status is
        collected. `is_late` says whether the program has reached its time limit. Raises NotConfinedError if the process
        ended, or was killed, before the sandbox around it was complete; then the program itself has not begun.
        """
        with contextlib.suppress(ProcessLookupError):
            os.kill(running.pid, signal.SIGKILL)
        _, status = os.waitpid(running.pid, 0)
        late = f"did not end within {self._wall_s:g} s"
        if not running.said.startswith(BEGUN):
            code = os.waitstatus_to_exitcode(status)
            raise NotConfinedError(
                running.said.decode(errors="replace")[:REASON] or (late if is_late else ending(code))
            )
        said = running.said.removeprefix(BEGUN)
        if said == running.token:
            return None
        if is_late:
            return late
        if text := said.decode(errors="replace"):
            return text[:REASON]
        code = self._confinement.exit_code(os.waitstatus_to_exitcode(status))
        return f"used more than {self._cpu_s:g} s of processor time" if code == -signal.SIGXCPU else ending(code)


def _started(program: str, confinement: Confinement) -> tuple[int, int, bytes]:
    """Start a process that executes `program`; return (pipe with its output, process id, secret token).

    `confinement` is the sandbox of the process. The process writes the token to the pipe if the program ran to its end.
    """
    read, write = os.pipe()
    token = secrets.token_bytes(16)
    if isinstance(confinement, Bubblewrap):
        pid = _spawn(program, token, confinement, write)
    elif (pid := os.fork()) == 0:
        run(program, confinement.apply, write, token)
    os.close(write)
    return read, pid, token


def _spawn(program: str, token: bytes, confinement: Bubblewrap, pipe: int) -> int:
    """Start a program's process under bwrap, and return the process id.

    `confinement` is the sandbox. The process writes its output to the file descriptor `pipe`, with `token` if the
    program ran to its end.
    """
    command, environment = confinement.command(
        without_packages(f"from {run_confined.__module__} import run_confined; run_confined()"),
        os.environ,  # this process's environment has no secrets
    )
    with os.fdopen(os.memfd_create("program"), "wb") as file:
        file.write(
            start_message(
                program,
                token,
                user=confinement.user,
                limits=confinement.limits(),
                is_filtered=confinement.filters_system_calls,
            )
        )
        file.seek(0)
        process = subprocess.Popen(command, env=environment, stdin=file, stdout=pipe, stderr=pipe)
    process.returncode = 0  # the caller waits for the process by its id
    return process.pid


def _enforced(confinement: Confinement) -> str:
    """Names of the mechanisms of the sandbox `confinement`, found by starting a trial process in it."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(ConfinementUnavailable):
            os.write(write, confinement.apply().encode())
        os._exit(0)
    os.close(write)
    text = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(pid, 0)
    return text
