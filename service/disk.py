"""Directories that the service writes to: a lock for the process that uses one, and checks of its disk's free space."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from service.errors import InUse

__all__ = [
    "LOCK_FILE",
    "alignments_dir",
    "artifacts_dir",
    "data_dir_of",
    "free_bytes",
    "gib",
    "job_dir",
    "lack_of_space",
    "locked",
]

# For configuration, tokenizer, model card, and what other programs write meanwhile.
MARGIN_BYTES = 64 * 2**20

# Holds the id of the process that last locked the directory.
LOCK_FILE = ".lock"


def job_dir(data_dir: Path, study_id: str) -> Path:
    """Where the drivers of a study keep their files, in a server's data directory."""
    return data_dir / "studies" / study_id


def artifacts_dir(data_dir: Path) -> Path:
    """Where the files of artifacts are, in a server's data directory or in that of a run."""
    return data_dir / "artifacts"


def alignments_dir(directory: Path) -> Path:
    """Where the files of a study's alignments are, in that of a run or of a study on a server."""
    return directory / "alignments"


def data_dir_of(work_dir: Path) -> Path:
    """The data directory in which `work_dir` is a study's."""
    return work_dir.parents[1]


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Lock `directory` for this process, until it exits at the latest. Raises InUse if another process has it."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InUse(
                f"{directory}: process {file.read().strip() or 'unknown'} is at work here; "
                "wait for it, stop it, or give another directory"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def free_bytes(directory: Path) -> int:
    """Bytes that this user can still write on the disk where `directory` is or will be."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def lack_of_space(directory: Path, num_bytes: int) -> str | None:
    """Why a model of `num_bytes` cannot be written to `directory`. None if it can, or if the directory is not empty:
    then it holds that model, or the writer refuses to touch it."""
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
