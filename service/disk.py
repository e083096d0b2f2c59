"""Room on a disk for what is about to be written there."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["free_bytes", "gib", "lack_of_space"]

# Beside the weights: configuration, tokenizer, model card, and what else is written meanwhile.
MARGIN_BYTES = 64 * 2**20


def free_bytes(directory: Path) -> int:
    """What this user may still write on the disk where `directory` is or will be."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def lack_of_space(directory: Path, num_bytes: int) -> str | None:
    """Why a model of `num_bytes` cannot be written to `directory`; None if it can, or if something is there already
    (then it is that model, or the writer refuses to touch it)."""
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        return None
    needed, free = num_bytes + MARGIN_BYTES, free_bytes(directory)
    if needed <= free:
        return None
    return (
        f"{directory}: the disk has {gib(free)} free, the merged model needs {gib(needed)}; "
        "make room or give a directory on another disk"
    )


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
