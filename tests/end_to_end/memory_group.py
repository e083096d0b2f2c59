"""A control group for tests, whose memory Ray takes for the memory of its machine.

Ray's memory monitor compares the memory that its container uses with the container's limit. In a group of its own, a
Ray ends workers when this Ray uses much memory, whatever other processes on the machine use. Needs root and version 1
of Linux's control groups; the files of version 2 have other names.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["MemoryGroup", "memory_group"]

GROUPS = Path("/sys/fs/cgroup/memory")
LIMIT_FILE = "memory.limit_in_bytes"
EMPTY_S = 60.0

FILL = """
import sys, time
step, pause_s = int(sys.argv[1]), float(sys.argv[2])
filled = []
while True:
    filled.append(b"x" * step)
    time.sleep(pause_s)
"""


@dataclass(frozen=True)
class MemoryGroup:
    """The group in the directory `place`."""

    place: Path

    @property
    def launcher(self) -> Sequence[str]:
        """Words before a command that put its processes into the group and show them only the group's memory."""
        place = shlex.quote(str(self.place))
        script = f'echo $$ > {place}/cgroup.procs; mount --bind {place} {GROUPS}; exec "$@"'
        return ["unshare", "--mount", "bash", "-ec", script, "bash"]

    def fill(self, until: Callable[[], bool], *, step_bytes: int, pause_s: float) -> bool:
        """Fill memory step by step, and free it when `until` is true; False if the limit was reached before."""
        command = [*self.launcher, sys.executable, "-c", FILL, str(step_bytes), str(pause_s)]
        process = subprocess.Popen(command)
        try:
            while not (is_reached := until()) and process.poll() is None:
                time.sleep(pause_s)
        finally:
            process.kill()
            process.wait()
        return is_reached


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A new group that may use `limit_bytes`; it is removed at the end, when its processes have ended.

    Raises OSError with the reason where no group can be made.
    """
    if os.geteuid() != 0:
        raise OSError("a control group of its own for the memory fault needs root")
    if not (GROUPS / LIMIT_FILE).exists():
        raise OSError(f"the memory fault needs control groups of version 1: {GROUPS} has no {LIMIT_FILE}")
    group = MemoryGroup(GROUPS / f"mergesearch-{os.getpid()}")
    group.place.mkdir()
    try:
        (group.place / LIMIT_FILE).write_text(str(limit_bytes))
        yield group
    finally:
        deadline = time.monotonic() + EMPTY_S
        while group.place.exists():
            try:
                group.place.rmdir()
            except OSError:  # processes that were killed have not ended yet
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.2)
