"""The main function of the process that executes programs: it forks a confined process for each of them.

This process runs no program itself and imports no large package, so that forking takes a millisecond. Programs see
neither it nor each other.
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
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from workers.evaluation.channel import Channel
from workers.evaluation.confinement import PR_SET_PDEATHSIG, Confinement, ConfinementUnavailable

__all__ = ["WALL_FACTOR", "ExecutionStart", "serve"]

# A program that waits, or gets no processor, ends after this multiple of its limit of processor time. The limit that
# counts is that of processor time, because a value must not depend on what else the machine does.
WALL_FACTOR = 10
REASON = 500  # most characters of the reason why a program failed


@dataclass(frozen=True)
class ExecutionStart:
    """The first message: what confines each program, and how many run at a time."""

    confinement: Confinement
    num_parallel: int


@dataclass
class _Running:
    index: int
    pid: int
    token: bytes
    deadline: float
    said: bytes = b""


def serve() -> None:
    """Run until the other end of the connection closes, whose file descriptor is the only argument.

    The first message is an ExecutionStart, each further one a list of programs (text). The reply to the first says what
    confines a program, or why none can be confined ("error"). The reply to others has for each program null if it ran
    to its end, or the reason why it did not.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError, ConnectionError):
        start: ExecutionStart = pickle.loads(channel.receive())
        reason = _execute([""], start)[0]
        channel.send(json.dumps({"error": reason} if reason else {"enforced": _enforced(start.confinement)}).encode())
        while True:
            channel.send(json.dumps({"reasons": _execute(pickle.loads(channel.receive()), start)}).encode())


def _execute(programs: Sequence[str], start: ExecutionStart) -> list[str | None]:
    reasons: list[str | None] = [None] * len(programs)
    waiting = iter(enumerate(programs))
    limit_s = WALL_FACTOR * (start.confinement.cpu_s or 1)
    with selectors.DefaultSelector() as selector:
        while True:
            for index, program in _some(waiting, start.num_parallel - len(selector.get_map())):
                pipe, pid, token = _fork(program, start.confinement)
                selector.register(pipe, selectors.EVENT_READ, _Running(index, pid, token, time.monotonic() + limit_s))
            if not selector.get_map():
                return reasons
            left = min(key.data.deadline for key in selector.get_map().values()) - time.monotonic()
            ready = {key.fd for key, _ in selector.select(max(0.0, left))}
            for key in list(selector.get_map().values()):
                running: _Running = key.data
                if key.fd in ready and (piece := os.read(key.fd, 4096)) and len(running.said) < 4096:
                    running.said += piece
                elif key.fd in ready or time.monotonic() > running.deadline:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    reasons[running.index] = _outcome(
                        running, limit_s, cpu_s=start.confinement.cpu_s or 1, is_late=key.fd not in ready
                    )


def _some(waiting: Iterator[tuple[int, str]], number: int) -> Iterator[tuple[int, str]]:
    for _ in range(number):
        yield from [pair] if (pair := next(waiting, None)) else []


def _outcome(running: _Running, limit_s: float, *, cpu_s: float, is_late: bool) -> str | None:
    """End a program's process; returns the reason why it did not run to its end, or None."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(running.pid, signal.SIGKILL)
    _, status, usage = os.wait4(running.pid, 0)
    if running.said == running.token:
        return None
    if is_late:
        return f"did not end within {limit_s:g} s"
    if text := running.said.decode(errors="replace"):
        return text[:REASON]
    if usage.ru_utime + usage.ru_stime >= cpu_s - 0.1:  # the kernel ends it
        return f"used more than {cpu_s:g} s of processor time"
    code = os.waitstatus_to_exitcode(status)
    return f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"


def _fork(program: str, confinement: Confinement) -> tuple[int, int, bytes]:
    """Start a process for a program; returns where its outcome can be read, its id, and what success looks like."""
    read, write = os.pipe()
    token = secrets.token_bytes(16)
    if (pid := os.fork()) == 0:
        _run(program, confinement, write, token)
    os.close(write)
    return read, pid, token


def _run(program: str, confinement: Confinement, pipe: int, token: bytes) -> None:
    """Execute a program in this process, which ends with it."""
    outcome = token
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.dup2(pipe, 3)
        os.closerange(4, 1 << 16)
        for standard in range(3):
            os.dup2(os.open(os.devnull, os.O_RDWR), standard)
        os.closerange(4, 64)
        os.chdir("/")
        sys.argv = [""]
        confinement.apply()
        exec(compile(program, "program.py", "exec"), {"__name__": "__main__"})
    except BaseException as error:  # a program may raise anything
        outcome = f"{type(error).__name__}: {error}"[:REASON].encode(errors="replace")
    os.write(3, outcome)
    os._exit(0)


def _enforced(confinement: Confinement) -> str:
    """What confines a process, in words, asked of a process that is confined."""
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
