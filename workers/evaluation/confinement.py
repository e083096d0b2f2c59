"""Interface of the sandboxes that confine processes, and the files and resources that a confined process may use.

There are two sandboxes, `bubblewrap` and `landlock`, which differ in how they limit files. In both, the same filter
limits the system calls (module `system_calls`), so that a program behaves the same. A process cannot remove a
restriction.
"""

from __future__ import annotations

import resource
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from workers.evaluation.system_calls import filter_system_calls, forbid_new_privileges, limit_resources, refuse_threads

__all__ = ["DEVICES", "MIB", "Confinement", "ending", "system_paths"]

MIB = 1 << 20

# Files and folders that the interpreter and libraries open; they hold no secrets.
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/zero", "/dev/urandom", "/dev/random")
DEVICES = ("/dev/null",)  # may be written too


def system_paths() -> tuple[str, ...]:
    """The directories and files that every Python process reads: interpreter, installed packages, system libraries.

    The working directory and other places of `sys.path` that hold no installed packages are left out.
    """
    packages = [place for place in sys.path if Path(place).name in ("site-packages", "dist-packages")]
    return tuple(dict.fromkeys([sys.prefix, sys.base_prefix, *packages, *SYSTEM]))


def ending(code: int) -> str:
    """Description of how a process ended: its exit code, or the signal if `code` is negative."""
    if code >= 0:
        return f"exit code {code}"
    # Most real-time signals have no name.
    return f"signal {signal.Signals(-code).name if -code in {*signal.Signals} else -code}"


@dataclass(frozen=True)
class Confinement(ABC):
    """Interface of the sandboxes (classes `Bubblewrap` and `Landlock`): the files and resources of one process.

    - `readable`, `writable`: absolute paths of files, and of directories with everything below them
    - `listable`: directories in which the process can list the names of files, but not read the files; with bubblewrap,
      only the names of readable files are listed
    - `memory_bytes`: the limit of the address space
    - `file_bytes`: the limit of the size of a file that is written
    - `cpu_s`: the limit of processor time in seconds; None is no limit
    """

    readable: tuple[str, ...] = field(default_factory=system_paths)
    writable: tuple[str, ...] = ()
    listable: tuple[str, ...] = ()
    memory_bytes: int = 8192 * MIB
    file_bytes: int = 1024 * MIB
    cpu_s: int | None = None

    @abstractmethod
    def command(self, command: Sequence[str], environment: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
        """Return the command line and the environment with which to start a process in the sandbox.

        `command` is the command line of the process itself, and `environment` is its environment. The process must call
        the method `apply` before it runs untrusted code.
        """
        ...

    def exit_code(self, code: int) -> int:
        """Convert the exit code of the started process to the exit code of the process in the sandbox.

        The started process is the process of the command line that the method `command` returns. The two codes differ
        if this command line is a program, such as bwrap, that starts the process in the sandbox. The result is negative
        if a signal ended the process.
        """
        return code

    def of_program(self, number: int) -> Self:
        """Sandbox for the next program that the calling process starts; here, the same sandbox for every program.

        A subclass may run each program as a different user, which follows from `number`, the number of programs that
        the calling process has started before.
        """
        return self

    def apply(self) -> str:
        """Put the calling process into the sandbox for the rest of its life; return the names of the mechanisms used.

        From then on the process

        - reads only some devices and the files in the fields `readable` and `writable`, and writes only the files in
          `writable`
        - lists only the directories among these paths and the directories in the field `listable`
        - has no network, starts no process and no program, and sends signals to itself only
        - neither reads other processes nor changes their priority, affinity or limits
        - changes no owners, modes, times or attributes of files, mounts nothing, and enters no namespace

        Raises ConfinementUnavailable if the system lacks a mechanism for these restrictions, and RuntimeError if the
        process has several threads. After an error the process must not continue.
        """
        refuse_threads()
        limit_resources(self.limits())
        forbid_new_privileges()
        enforced = self._restrict_files()
        filter_system_calls()
        return f"{enforced}, seccomp"

    def limits(self) -> dict[int, int]:
        """Resource limits of the process: a dict from kinds of resources (`resource.RLIMIT_*`) to limits."""
        limits = {
            resource.RLIMIT_AS: self.memory_bytes,
            resource.RLIMIT_FSIZE: self.file_bytes,
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_NOFILE: 256,
        }
        return limits if self.cpu_s is None else {**limits, resource.RLIMIT_CPU: self.cpu_s}

    @abstractmethod
    def _restrict_files(self) -> str:
        """Let the calling process access only the files of the sandbox.

        The result names the mechanism that ensures this, with its version. If the process was started by a command that
        already restricts its files (bubblewrap), nothing is left to do.
        """
        ...
