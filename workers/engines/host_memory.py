"""Free and total host memory of this machine or container, for all engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

__all__ = ["free_host_bytes", "total_host_bytes"]

CGROUP = Path("/sys/fs/cgroup")


def free_host_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of free host memory within the limit of this process's container.

    `cgroup` is the directory of the container's control group (cgroup v2).
    """
    return min([int(psutil.virtual_memory().available), *_left_by_limit(cgroup)])


def total_host_bytes(cgroup: Path = CGROUP) -> int:
    """Bytes of host memory of this machine, or of this process's container if its limit is lower.

    `cgroup` is the directory of the container's control groups (cgroup v2, or v1 with the controller `memory`).
    """
    found = [int(psutil.virtual_memory().total)]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            found.append(int((cgroup / file).read_text()))
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return min(found)


def _left_by_limit(cgroup: Path) -> Iterator[int]:
    """Yield the number of bytes that the control group `cgroup` may still allocate, or nothing if it has no limit.

    Cached file pages count as free, because the kernel can reclaim them.
    """
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        counts = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    if limit != "max":
        yield max(0, int(limit) - used + int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0)))
