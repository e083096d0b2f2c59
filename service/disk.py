"""Paths, file locks and free disk space of the directories that the service writes to."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from service.errors import InUse

__all__ = [
    "DATABASE",
    "DRAINED",
    "LOCK_FILE",
    "alignments_dir",
    "artifacts_dir",
    "data_dir_of",
    "existing",
    "free_bytes",
    "gib",
    "job_dir",
    "lack_of_space",
    "locked",
    "parse_bytes",
    "sign_lock",
    "single_server",
]

# Space for configuration, tokenizer and model card, and for files that other programs write during an export.
MARGIN_BYTES = 64 * 2**20

# The file of a server's database, unless the server is given another database.
DATABASE = "mergesearch.db"

# Holds the id of the process that last locked the directory.
LOCK_FILE = ".lock"

# While this file exists in a server's data directory, its jobs wait.
DRAIN_FILE = "drained"

# Text with which a server answers while this file exists.
DRAINED = "the server is drained: jobs wait until `mergesearch drain --end`"


def job_dir(data_dir: Path, job_id: str) -> Path:
    """Directory of the files of the processes that work on the job `job_id`, inside the server's `data_dir`."""
    return data_dir / "studies" / job_id


def artifacts_dir(data_dir: Path) -> Path:
    """Directory for artifacts: files that jobs make and the server stores, such as trained experts.

    `data_dir` is a server's data directory, or the directory of a `mergesearch run`.
    """
    return data_dir / "artifacts"


def alignments_dir(directory: Path) -> Path:
    """Directory for the files of a study's alignments (learned maps between layers of different models).

    `directory` is the directory of the study's job on a server, or of its `mergesearch run`.
    """
    return directory / "alignments"


def data_dir_of(work_dir: Path) -> Path:
    """Data directory of the server whose job has the directory `work_dir` (inverse of the function `job_dir`)."""
    return work_dir.parents[1]


@contextmanager
def locked(directory: Path, *, is_shared: bool = False) -> Iterator[bool]:
    """Context that holds the file lock of `directory`, which is created if it does not exist.

    If `is_shared` is True, other processes that also share the lock may hold it at the same time. Yields True if no
    other process held the lock when this process took it, else False.

    Raises:
        InUse: Another process holds the lock, and this process or the other one does not share it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK_FILE).open("a+") as file:
        is_alone = _try_lock(file, fcntl.LOCK_EX)
        if not (is_alone or (is_shared and _try_lock(file, fcntl.LOCK_SH))):
            file.seek(0)
            raise InUse(
                f"{directory}: process {file.read().strip() or 'unknown'} is using this directory; "
                "wait for it, stop it, or give another directory"
            )
        if is_alone:
            sign_lock(directory)
            if is_shared:
                fcntl.flock(file, fcntl.LOCK_SH)
        yield is_alone


def _try_lock(file: IO[str], operation: int) -> bool:
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def sign_lock(directory: Path) -> None:
    """Write the id of this process to the lock file of `directory`, whose lock this process must hold.

    Another process that does not take the lock can find out by this id whether the directory is in use.
    """
    with (directory / LOCK_FILE).open("r+") as file:
        file.truncate(0)
        file.write(str(os.getpid()))


@contextmanager
def single_server(database: Path) -> Iterator[None]:
    """Context in which no other server uses the SQLite file `database`.

    The file is created if needed.

    Raises:
        InUse: Another server uses the file.
    """
    database.parent.mkdir(parents=True, exist_ok=True)
    with database.open("a") as file:
        if not _try_lock(file, fcntl.LOCK_EX):
            raise InUse(f"database {database}: another server uses it; several servers need PostgreSQL (--database)")
        yield


def free_bytes(directory: Path) -> int:
    """Free bytes, for the current user, on the disk of `directory`, which need not exist yet."""
    return shutil.disk_usage(existing(directory)).free


def existing(directory: Path) -> Path:
    """Closest existing directory: `directory` itself or, if it does not exist, the closest parent that does."""
    place = directory.absolute()
    while not place.exists():
        place = place.parent
    return place


def lack_of_space(directory: Path, num_bytes: int) -> str | None:
    """Reason why a merged model of `num_bytes` does not fit on the disk of `directory`; None if the model fits.

    The model fits if 64 MiB (MARGIN_BYTES) remain free after it is written. If `directory` is a file, or a directory
    with content, nothing will be written there, and the result is None.
    """
    if directory.is_file() or (directory.is_dir() and any(directory.iterdir())):
        return None
    needed, free = num_bytes + MARGIN_BYTES, free_bytes(directory)
    if needed <= free:
        return None
    return (
        f"{directory}: the disk has {gib(free)} free, the merged model needs {gib(needed)}; "
        "make room or give a directory on another disk"
    )


def gib(num_bytes: float) -> str:
    """Format `num_bytes`, a number of bytes, as text in GiB."""
    return f"{num_bytes / 2**30:.1f} GiB"


def parse_bytes(text: str) -> int:
    """Parse a size such as "500MB", "5GB" or "8GiB" as a number of bytes. Raises ValueError for other texts."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMGT])(I?)B", text.upper())
    if match is None or float(match[1]) == 0:
        raise ValueError(f"{text!r} is not a size; write it as 500MB, 5GB or 8GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** ("KMGT".index(match[2]) + 1))
