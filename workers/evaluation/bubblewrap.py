"""Sandbox by bubblewrap: a process runs in separate namespaces, where it sees only the files that it needs.

The program `bwrap` must be installed (Debian: the package bubblewrap), version 0.8 or newer, and the system must let
users create namespaces. Within the namespaces, the filter of system calls and the limits of the module `confinement`
also apply.

Source: bwrap(1).
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, Self

from workers.evaluation.confinement import DEVICES, Confinement
from workers.evaluation.program_process import become
from workers.evaluation.system_calls import ConfinementUnavailable

__all__ = ["Bubblewrap"]

ALWAYS = ("--die-with-parent", "--new-session", "--cap-drop", "ALL")
NAMESPACES = ("--unshare-all", "--unshare-user", "--disable-userns")
# Namespaces of a process that becomes another user. A namespace of users is not among them, because it maps only root.
NAMESPACES_OF_ROOT = (
    *("--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
    *("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"),
)
# Makes the root directory read-only: it is a file system in memory, which could be filled without limit.
READ_ONLY = ("--remount-ro", "/")
MAX_THREADS = 256  # of a program

# Numbers of the users and groups under which programs run if root starts them, because the limit of threads does not
# apply to root. Each program has its own user, because the kernel counts the threads of a user.
USERS = range(61_000, 65_000)

# Folders of the packages that the process imports before it calls `apply`.
OWN = tuple(str(Path(__file__).parents[2] / package) for package in ("search_spaces", "workers"))


def bwrap() -> str:
    """Path of the installed program bwrap; "" if there is none."""
    return shutil.which("bwrap") or ""


@lru_cache(maxsize=1)
def _version(program: str) -> str:
    """Name and version of bubblewrap, as `program` (bwrap) prints them, for example "bubblewrap 0.8.0"."""
    if not program:
        return "bubblewrap"
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=False, env={}).stdout.strip()


@dataclass(frozen=True)
class Bubblewrap(Confinement):
    """Sandbox for one process by the program bwrap, in separate Linux namespaces.

    There are separate namespaces for users, processes, network, mounts, IPC, host name and control groups. The process
    finds its readable files at their usual places and no other files; /proc is absent. `program` is the path of bwrap,
    and `version` is the text that it prints with --version.

    `user` is the number of the user, and of the group, to which the process switches in the method `apply`; with None,
    it does not switch. Only a process that root started can switch. A process that switches has no namespace of users.
    """

    program: str = field(default_factory=bwrap)
    version: str = field(default_factory=lambda: _version(bwrap()))
    user: int | None = None

    filters_system_calls: ClassVar[bool] = True  # False only in tests of bwrap alone

    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Command line and environment for starting bwrap, which starts the process `command` in the sandbox.

        The arguments of bwrap set the variables of `environment` for the process. The returned environment of bwrap
        itself is empty, because programs in the sandbox may be able to read it. Raises ConfinementUnavailable if bwrap
        is not installed.
        """
        if not self.program:
            raise ConfinementUnavailable("there is no program bwrap (Debian: the package bubblewrap)")
        return [self.program, *self.arguments(environment), "--", *command], {}

    def arguments(self, environment: Mapping[str, str]) -> list[str]:
        """Arguments of bwrap that describe the sandbox: namespaces, files, devices, and environment variables.

        `environment` has the environment variables of the process in the sandbox.
        """
        readable = _outermost([*self.readable, *OWN])
        folders = {str(above) for place in (*readable, *self.writable) for above in Path(place).parents}
        places = [
            *(
                argument
                for place in sorted({*folders, *self.listable})
                for argument in ("--perms", "0755", "--dir", place)
            ),
            *(argument for place in readable for argument in _bind(place)),
            *(argument for place in self.writable for argument in ("--bind", place, place)),
            *(argument for place in DEVICES for argument in _bind(place)),
        ]
        variables = [argument for item in environment.items() for argument in ("--setenv", *item)]
        namespaces = NAMESPACES if self.user is None else NAMESPACES_OF_ROOT
        return [*ALWAYS, *namespaces, *places, *READ_ONLY, *variables, "--chdir", "/"]

    def exit_code(self, code: int) -> int:
        """Convert bwrap's exit code to the exit code of the process in the sandbox.

        bwrap reports a signal as 128 plus the signal's number. The result is then the signal's number, negated. Any
        other code is returned unchanged.
        """
        return 128 - code if code - 128 in signal.valid_signals() else code

    def of_program(self, number: int) -> Self:
        return replace(self, user=USERS[number % len(USERS)]) if os.geteuid() == 0 else self

    def apply(self) -> str:
        become(self.user)
        return super().apply()

    def limits(self) -> dict[int, int]:
        """Resource limits of the process: a dict from kinds of resources (`resource.RLIMIT_*`) to limits.

        A process with a limit of processor time also gets a limit of threads.
        """
        return {**super().limits(), **({} if self.cpu_s is None else {resource.RLIMIT_NPROC: MAX_THREADS})}

    def _restrict_files(self) -> str:
        return self.version  # bwrap has already restricted the files


def _bind(place: str) -> tuple[str, str, str]:
    return "--dev-bind-try" if place.startswith("/dev/") else "--ro-bind-try", place, place


def _outermost(places: Iterable[str]) -> list[str]:
    """The paths in `places` that are not below another of these paths."""
    found: list[str] = []
    for place in sorted(set(places)):
        if not any(place.startswith(above.rstrip(os.sep) + os.sep) for above in found):
            found.append(place)
    return found
