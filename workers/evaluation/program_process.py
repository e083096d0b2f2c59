"""Execution of one program in a separate confined process.

A process that is started for a program imports this module first. Therefore this module imports only modules that load
quickly.
"""

from __future__ import annotations

import builtins
import ctypes
import marshal
import os
import signal
import sys
from collections.abc import Callable, Mapping

from workers.evaluation.system_calls import (
    PR_SET_PDEATHSIG,
    filter_system_calls,
    forbid_new_privileges,
    limit_resources,
    refuse_threads,
)

__all__ = ["BEGUN", "REASON", "become", "run", "run_confined", "start_message"]

BEGUN = b"\0"  # sent once the process is confined; earlier errors are not the program's
REASON = 500  # most characters of the reason why a program failed


def start_message(
    program: str, token: bytes, *, user: int | None, limits: Mapping[int, int], is_filtered: bool
) -> bytes:
    """Serialise the message that the function `run_confined` reads from the standard input of its process.

    - `program`: the program to execute
    - `token`: the bytes that the process writes if the program runs to its end
    - `user`: the number of the user to switch to, or None
    - `limits`: resource limits, keyed by the constants `resource.RLIMIT_*`
    - `is_filtered`: whether system calls are filtered
    """
    return marshal.dumps((program, token, user, dict(limits), is_filtered))


def run_confined() -> None:
    """Confine this process, which bwrap has started, and execute the program on its standard input.

    The standard input has the result of the function `start_message`. The function `run` executes the program, and
    writes to the standard output whether the program ran to its end.
    """
    program, token, user, limits, is_filtered = marshal.load(sys.stdin.buffer)

    def confine() -> None:
        become(user)
        refuse_threads()
        limit_resources(limits)
        forbid_new_privileges()
        if is_filtered:
            filter_system_calls()

    run(program, confine, 1, token)


def become(user: int | None) -> None:
    """Switch this process, which runs as root, to the user and group with the number `user`.

    With None, nothing is changed.
    """
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)


def run(program: str, confine: Callable[[], object], pipe: int, token: bytes) -> None:
    """Execute a program in this process, write its outcome to `pipe`, and exit.

    `confine` puts the process into its sandbox. When this is done and the program begins, BEGUN is written to `pipe`.
    At the end, `token` is written if the program ran to its end, else the reason why it did not.
    """
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
        confine()
        for name in ("exit", "quit"):
            setattr(builtins, name, sys.exit)  # without site packages there are none
        os.write(3, BEGUN)
        exec(compile(program, "program.py", "exec", dont_inherit=True), {"__name__": "__main__"})
    except BaseException as error:  # a program may raise anything
        outcome = f"{type(error).__name__}: {error}"[:REASON].encode(errors="replace")
    os.write(3, outcome)
    os._exit(0)
