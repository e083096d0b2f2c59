"""Anonymous memory of a process, which does not include the pages of mapped files."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path


def output(module: str, *arguments: str) -> str:
    """The last line that `python -m MODULE ARGUMENTS` prints, in a process that returns freed memory at once."""
    # Left alone, glibc keeps some tens of MB of what was freed, whatever the models' size, and the stack of a thread
    # of torch's counts 8 MB.
    glibc = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    settings = {"OMP_NUM_THREADS": "2", "OMP_STACKSIZE": "1M", "OMP_WAIT_POLICY": "passive", **glibc}
    command = [sys.executable, "-m", module, *arguments]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | settings)
    return finished.stdout.splitlines()[-1]


class Highest:
    """Context manager that records the process's largest anonymous memory, sampled every half millisecond."""

    def __enter__(self) -> Highest:
        self.bytes = 0
        self._is_over = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._watcher.join()

    def _watch(self) -> None:
        # Twenty times as fast as `status`, which would take a tenth of the time of what is watched.
        with Path("/proc/self/statm").open("rb", buffering=0) as file:
            while not self._is_over.wait(0.0005):
                _, resident, shared, *_ = os.pread(file.fileno(), 256, 0).split()
                self.bytes = max(self.bytes, (int(resident) - int(shared)) * mmap.PAGESIZE)


def status(field: str) -> int:
    """A field of the process's status file, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))
