"""One process that asks vLLM about models for all processes of a test session: to import vLLM takes 10 s of a core.

Tests run `command()` instead of `workers.engines.vllm.support.COMMAND`. The command sends the names of its input and
output files to the process that asks vLLM, and starts this process if necessary. The process executes
`support.PROGRAM`, as a process of `support.COMMAND` does, for each command. It ends with the session.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

__all__ = ["command"]

ROOT = Path(__file__).parents[1]
POLL_S = 0.05


def command() -> tuple[str, ...]:
    """The command by which tests of this process ask vLLM; the session is that of the parent under pytest-xdist."""
    session = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    return (sys.executable, "-I", "-S", __file__, "ask", str(session))  # without packages it starts in 20 ms


def address(session: str) -> str:
    """Address of an abstract socket, which leaves no file."""
    return f"\0mergesearch-tests-{session}-vllm"


def ask(session: str, *files: str) -> str:
    """Let the process ask vLLM; returns "", or the reason of its failure."""
    is_started = False
    while True:
        with socket.socket(socket.AF_UNIX) as connection:
            try:
                connection.connect(address(session))
            except ConnectionRefusedError:
                if not is_started:
                    subprocess.Popen(
                        [sys.executable, "-P", __file__, "serve", session],
                        env=os.environ | {"PYTHONPATH": str(ROOT)},
                        start_new_session=True,
                    )
                is_started = True
                time.sleep(POLL_S)
                continue
            connection.sendall("\n".join(files).encode())
            connection.shutdown(socket.SHUT_WR)
            return _all_of(connection)


def serve(session: str) -> None:
    """Ask vLLM for every process that connects, one after another, until the session has ended."""
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(address(session))
        except OSError:  # another process serves
            return
        listener.listen(100)
        ended = os.pidfd_open(int(session))
        from workers.engines.vllm.support import PROGRAM

        while ended not in select.select([listener.fileno(), ended], [], [])[0]:
            connection, _ = listener.accept()
            with connection:
                try:
                    sys.argv = ["-c", *_all_of(connection).split("\n")]
                    exec(PROGRAM, {})
                except Exception:  # the process that asked gets it, and shows it as its own
                    connection.sendall(traceback.format_exc().encode())


def _all_of(connection: socket.socket) -> str:
    """All bytes that the other end sends before it closes its side."""
    return b"".join(iter(lambda: connection.recv(4096), b"")).decode()


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "serve":
        serve(*arguments)
    elif failure := ask(*arguments):
        sys.exit(failure)
