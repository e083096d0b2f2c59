"""Atomic writes: files and directories get their names only when they are complete and on disk.

Until then they have hidden names in the same directory. A directory that a killed process did not complete is continued
by the next process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from workers.telemetry.phases import phase

__all__ = ["appearing", "partial_directories", "replacing", "scratch", "sync", "turn", "turn_if_writable", "write_file"]

# The suffix of the hidden directory, which has the files written so far, and its writer's notes beside them.
PARTIAL = ".partial"
MODEL = "model"

# Seconds between two looks at a lock that another process holds, and after which the log names that process.
POLL_S, TOLD_AFTER_S = 0.02, 5.0

# The file in a scratch directory that its process has locked, and the bytes that are left free on its disk.
SCRATCH_LOCK = ".lock"
SCRATCH_MARGIN = 256 << 20
GIB = 1 << 30

log = logging.getLogger(__name__)


@contextmanager
def turn(place: Path, *, limit_s: float | None = None) -> Iterator[None]:
    """Context manager that locks `place`, a file or directory, against other processes of this machine.

    If another process has the lock, this process waits for it, and the log says so once. The lock is also freed when
    the process that has it ends. With `limit_s`, TimeoutError is raised after this number of seconds; the message names
    the process and the lock file.
    """
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_name(f".{place.name}.lock")
    with lock.open("a+") as file:
        began = time.monotonic()
        is_told = False
        with ExitStack() as stack:
            while not _is_locked(file):
                waited = time.monotonic() - began
                holder = f"process {lock.read_text().strip() or 'unknown'} works on {place}"
                if limit_s is not None and waited >= limit_s:
                    raise TimeoutError(
                        f"{holder} since more than {limit_s:g} s; it holds {lock}: wait for it, or end it"
                    )
                if waited >= TOLD_AFTER_S and not is_told:
                    is_told = True
                    log.warning("%s; this process waits for it", holder)
                    stack.enter_context(phase(f"waits for another process that works on {place.name}"))
                time.sleep(POLL_S)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def turn_if_writable(place: Path) -> Iterator[None]:
    """Context manager that locks `place` as `turn` does, or goes on without a lock if the lock file cannot be written.

    It cannot be written on a read-only disk, or if another user has made the file. Several processes may then do the
    same work; the log says so.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(turn(place))
        except OSError as error:
            if not isinstance(error, PermissionError) and error.errno != errno.EROFS:
                raise
            log.warning("other processes may work on %s at the same time, it cannot be locked: %s", place, error)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def scratch(num_bytes: int, *, name: str, places: Sequence[Path]) -> Iterator[Path]:
    """Context manager that yields a new directory for `num_bytes` of temporary files, and removes it at the end.

    The directory is made in the first of `places` whose disk has room for these files and for SCRATCH_MARGIN bytes
    more. `name` is the purpose of the files, and begins the directory's name. First, directories of the same purpose
    that killed processes left behind are removed. Raises OSError (ENOSPC) if no disk has the room; the message has the
    free space of each disk.
    """
    seen = []
    for place in places:
        try:
            place.mkdir(parents=True, exist_ok=True)
            _remove_killed(place, name)
            free = shutil.disk_usage(place).free
            if free < num_bytes + SCRATCH_MARGIN:
                seen.append(f"{place}: {free / GIB:.1f} GiB free")
                continue
            hidden = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=place))
        except PermissionError as error:
            seen.append(str(error))
            continue
        directory = place / hidden.name.removeprefix(".")
        with (hidden / SCRATCH_LOCK).open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            hidden.rename(directory)  # not before it is locked: other processes remove what is not
            try:
                yield directory
            finally:
                shutil.rmtree(directory, ignore_errors=True)
        return
    raise OSError(
        errno.ENOSPC,
        f"{(num_bytes + SCRATCH_MARGIN) / GIB:.1f} GiB of temporary files fit on no disk ({'; '.join(seen)}); make "
        "room, or set TMPDIR to a directory on a larger disk",
    )


def _remove_killed(place: Path, name: str) -> None:
    """Remove the scratch directories in `place` with the prefix `name` whose process has ended."""
    for directory in place.glob(f"{name}-*"):
        with suppress(OSError), (directory / SCRATCH_LOCK).open("r+") as file:
            if _is_locked(file):
                shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def appearing(out: Path, key: str) -> Iterator[Path]:
    """Context manager that yields a new directory and, once it is complete and on disk, renames it to `out`.

    Until then the directory has a hidden name beside `out`. `key` identifies the content that is written. If this
    process is killed or interrupted, the hidden directory stays, and the next writer with the same `key` continues in
    it. If writing fails with an exception, the directory is removed. Raises FileExistsError while another process
    writes to `out`, and if `out` was created meanwhile and is not empty.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    place = out.parent / f".{out.name}.{key}{PARTIAL}"
    _remove_abandoned(out, but=place)
    place.mkdir(exist_ok=True)
    with _opened(place) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(lock), place.stat()):
                raise FileNotFoundError(place)  # the last holder of the lock removed it; this is a new directory
        except (BlockingIOError, FileNotFoundError) as error:
            raise FileExistsError(
                f"{out}: another process is writing this model there; wait for it, or give another directory"
            ) from error
        directory = place / MODEL
        try:
            directory.mkdir(exist_ok=True)
            yield directory
            for path in directory.rglob("*"):  # also in folders, such as the heads of classifiers
                sync(path)
            sync(directory)
            try:
                directory.rename(out)
            except OSError as error:
                raise FileExistsError(f"{out}: appeared meanwhile; expected a new or empty directory") from error
            sync(out.parent)
        except Exception:  # only exports that were killed or interrupted can be continued
            shutil.rmtree(place, ignore_errors=True)
            raise
        shutil.rmtree(place, ignore_errors=True)


def partial_directories(out: Path) -> list[Path]:
    """Hidden directories next to `out` with unfinished content for `out`.

    The directories belong to processes that are writing `out` now, or were left behind by killed processes.
    """
    if not out.parent.is_dir():
        return []
    return [
        path for path in out.parent.iterdir() if path.name.startswith(f".{out.name}.") and path.name.endswith(PARTIAL)
    ]


def _remove_abandoned(out: Path, *, but: Path) -> None:
    """Remove hidden directories that killed writers of `out` left behind, except the directory `but`.

    A directory that a running process writes to is kept; it is recognised by the lock that the process holds on it.
    """
    for path in partial_directories(out):
        if path != but:
            with suppress(FileNotFoundError, BlockingIOError), _opened(path) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Context manager that yields a new file and, once it is complete and on disk, replaces `file` by it.

    The directory of `file` is created if it does not exist. If writing fails, the new file is removed and `file` is not
    changed.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        yield new
        sync(new)
        new.replace(file)
        sync(file.parent)
    finally:
        new.unlink(missing_ok=True)


def write_file(file: Path, content: str | bytes) -> None:
    """Write a file atomically: other processes, and a restarted machine, find the old content or the new content."""
    with replacing(file) as new:
        new.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Wait until the content of the file `path`, or the list of names in the directory `path`, is on disk."""
    with _opened(path) as descriptor:
        os.fsync(descriptor)
