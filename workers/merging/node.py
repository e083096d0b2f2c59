"""Sharing between the processes of one node: one process computes a value or fills memory, and the others read it.

Ranks of an engine, and engines of one family of models, need the same statistics and the same source weights. These
processes share a directory of the node's shared memory, which is named after the content of the sources. Locks of the
operating system (`flock`) decide which process computes, and show which processes use the directory. When a process
ends for any reason, its lock ends too. A process that is killed, such as a Ray actor by `ray.kill`, leaves the files:
the owners of such processes close the memory first (method `Node.close`).
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import mmap
import os
import pickle
import shutil
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workers.telemetry.phases import phase

if TYPE_CHECKING:
    import torch

__all__ = [
    "SHARED_MEMORY",
    "NoRoom",
    "Node",
    "SharedDirectory",
    "free_shared_bytes",
    "remove_leftovers",
    "remove_unused",
    "shared_bytes",
]

log = logging.getLogger(__name__)

T = TypeVar("T")

SHARED_MEMORY = Path("/dev/shm")
# Locks for values; a value has one of these by its name, so that their number is bounded.
NUM_LOCKS = 64
# Rules of recipes are removed, the oldest first, once there are twice as many.
MOST_RULES = 4096
# A process counts the rules when it makes its first one, and again after this number of its own: it takes milliseconds.
RULES_BETWEEN_COUNTS = 256
OWN = "mergesearch-"  # followed by the number of the user who owns the directories
USERS, FILLING, FILLED, SOURCES = "users", "filling", "filled", "sources"
# A process that waits says so in the log after this time, and again each time that it has doubled.
FIRST_NOTE_S = 2.0


class NoRoom(Exception):
    """Raised if the node's shared memory has too little room; the message says how much is needed and free."""


class SharedDirectory:
    """Directory in the node's shared memory, which exists as long as a process has it open.

    `name` identifies the content; processes that give the same name share one directory. The last process that closes
    the directory removes it. If the last process was killed, the directory is removed when a process opens another
    directory, or by `remove_leftovers`. `root` is the directory of the node's shared memory; None means the constant
    SHARED_MEMORY.
    """

    def __init__(self, name: str, *, root: Path | None = None) -> None:
        own = _own_directory(root or SHARED_MEMORY)
        remove_unused(own, except_for=name)
        self.path = own / name
        while True:
            self.path.mkdir(mode=0o700, exist_ok=True)
            try:
                self._users = os.open(self.path / USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # it was removed in between
            _lock(self._users, fcntl.LOCK_SH, "another process that removes unused sources")
            if _is_at(self._users, self.path / USERS):
                break
            os.close(self._users)
        # Also called at the end of the interpreter, when module globals, which __del__ would need, may be gone.
        self._end = weakref.finalize(self, _close, self._users, self.path, os.getpid())

    def fill(self, num_bytes: int, write: Callable[[torch.Tensor], None], *, layout: str = "") -> torch.Tensor:
        """Return `num_bytes` of memory (uint8) that this node's processes share; one of them fills it with `write`.

        All processes that use the directory call this method. One of them fills the memory, and the others wait until
        it is full. If the process that fills the memory is killed, another process fills it from the beginning. The
        memory must not be written to afterwards. `layout` says what is where in the memory; it is stored beside it.

        Raises:
            NoRoom: There is too little shared memory, or a process has filled it with another layout.
        """
        if not (self.path / FILLED).exists():
            # A lock of its own: the shared lock on USERS is held as long as the directory is open, so that another
            # process would never get the exclusive one.
            with _locked(self.path / FILLING, "another process that reads the sources into shared memory"):
                if not (self.path / FILLED).exists():
                    write(self._memory(num_bytes, is_new=True))
                    new = self.path / f"{FILLED}.new"
                    new.write_text(layout)
                    new.replace(self.path / FILLED)
        if (self.path / FILLED).read_text() != layout:
            raise NoRoom(f"{self.path} was filled with another order of the tensors")
        return self._memory(num_bytes, is_new=False)

    def _memory(self, num_bytes: int, *, is_new: bool) -> torch.Tensor:
        import torch

        size = max(1, num_bytes)
        file = os.open(self.path / SOURCES, os.O_RDWR | (os.O_CREAT if is_new else 0) | os.O_CLOEXEC, 0o600)
        try:
            if is_new:
                free = os.fstatvfs(file).f_bavail * os.fstatvfs(file).f_frsize
                try:  # pages that are written without room would end the process
                    os.posix_fallocate(file, 0, size)
                except OSError as error:
                    os.truncate(file, 0)
                    raise NoRoom(
                        f"{self.path.parents[1]} has room for {free / 1e9:.2f} GB, the sources need {size / 1e9:.2f} GB"
                    ) from error
            found = mmap.mmap(file, size)
        finally:
            os.close(file)
        return torch.frombuffer(found, dtype=torch.uint8)[:num_bytes]

    def close(self) -> None:
        """End this process's use of the directory.

        The last process to close the directory removes it, and every process closes it when it ends. Memory that a
        process has mapped stays valid.
        """
        self._end()


def _close(users: int, path: Path, owner: int) -> None:
    """Close the lock file `users` of the directory `path`; the last process that uses the directory removes it.

    `owner` is the id of the process that opened the directory. A process that was forked from it shares its lock, and
    only closes the file.
    """
    if os.getpid() == owner:
        with suppress(BlockingIOError):
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
    os.close(users)


def free_shared_bytes() -> int:
    """Number of free bytes in the node's shared memory; 0 if the node has none."""
    try:
        return shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return 0


def shared_bytes(name: str) -> int:
    """Bytes of the source weights in the shared directory `name` of this user; 0 if there is no such directory.

    The processes of a node share the weights in such a directory in shared memory (class `SharedDirectory`).
    """
    try:
        return (SHARED_MEMORY / f"{OWN}{os.getuid()}" / name / SOURCES).stat().st_blocks * 512
    except OSError:
        return 0


def remove_leftovers(*, except_for: str = "") -> None:
    """Remove what killed processes of this user have left in the node's shared memory, so that it counts as free.

    A directory that a process has open is never removed, nor is the directory with the name `except_for`.
    """
    with suppress(NoRoom):
        remove_unused(_own_directory(SHARED_MEMORY), except_for=except_for)


def remove_unused(directory: Path, *, except_for: str = "") -> list[str]:
    """Remove the directories that killed processes have left in `directory`, and return their names.

    A directory that a process has open is never removed, nor is the directory with the name `except_for`.
    """
    removed = []
    for each in sorted(directory.iterdir()):
        if each.name == except_for:
            continue
        with suppress(OSError):
            users = os.open(each / USERS, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(users, each / USERS):
                    shutil.rmtree(each)
                    removed.append(each.name)
            finally:
                os.close(users)
    if removed:
        log.warning("removed what killed processes had left in %s: %s", directory, ", ".join(removed))
    return removed


class Node:
    """Cache of values that one process of a node computes and the other processes read.

    The values are in the directory `shared`. If `shared` is None, this process computes every value itself. A value is
    found by its name: a tuple that is the same in all processes, and begins with the kind of value, such as "norm" or
    "rule".
    """

    def __init__(self, shared: SharedDirectory | None = None) -> None:
        self.shared = shared
        self.num_made = 0  # values that this process computed
        self._num_rules = 0  # those of them that are rules

    def value(self, name: tuple[Any, ...], made: Callable[[], T], *, most_bytes: int | None = None) -> T:
        """Return a value that the processes of a node share; the first process that needs it calls `made`.

        `name` identifies the value in all processes. Other processes wait while one of them computes the value, and
        then read it from the shared directory. Without a shared directory, `made` is called every time, and nothing is
        stored. With `most_bytes`, the oldest values of this kind are removed once all of them have more bytes.
        """
        shared = self.shared
        if shared is None:
            return made()
        kind, digest = name[0], hashlib.sha256(repr(name).encode()).hexdigest()
        folder = shared.path / kind
        folder.mkdir(mode=0o700, exist_ok=True)
        file = folder / digest
        found = _read(file)
        if not found:
            with _locked(folder.with_suffix(f".lock{int(digest[:8], 16) % NUM_LOCKS}"), f"a {kind} of the sources"):
                found = _read(file)
                if not found:
                    found = [made()]
                    self.num_made += 1
                    _write(file, found)
                    if kind == "rule":
                        if self._num_rules % RULES_BETWEEN_COUNTS == 0:
                            _prune(folder)
                        self._num_rules += 1
                    if most_bytes is not None:
                        _prune_to(folder, most_bytes)
        value: T = found[0]
        return value

    def close(self) -> None:
        """End this process's use of the shared directory; later values are computed here. May be called twice."""
        if self.shared is not None:
            self.shared.close()
            self.shared = None


def _own_directory(root: Path) -> Path:
    """Directory of this user in shared memory; `root` is the directory of the shared memory.

    Raises NoRoom if the directory cannot be made, or if another user has made a directory of this name.
    """
    own = root / f"{OWN}{os.getuid()}"
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError as error:
        raise NoRoom(f"{own} cannot be made: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise NoRoom(f"{own} is not a directory of user {os.getuid()}; remove it")
    return own


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except OSError:
        return False


def _lock(file: int, kind: int, waits_for: str) -> None:
    """Take a lock (`flock`) on an open file; if another process holds it, wait until it is free.

    `file` is the file descriptor, and `kind` is LOCK_SH or LOCK_EX of `fcntl`. A long wait is logged as waiting for
    `waits_for`.
    """
    started, pause, note = time.monotonic(), 0.001, FIRST_NOTE_S
    with ExitStack() as stack:
        while True:
            try:
                fcntl.flock(file, kind | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                waited = time.monotonic() - started
                if waited > note:
                    if note == FIRST_NOTE_S:
                        stack.enter_context(phase(f"waits for {waits_for}"))
                    log.info("waiting for %s, for %.0f s so far", waits_for, waited)
                    note *= 2
                time.sleep(pause)
                pause = min(0.05, 2 * pause)


@contextmanager
def _locked(path: Path, waits_for: str) -> Iterator[None]:
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _lock(file, fcntl.LOCK_EX, waits_for)
        yield
    finally:
        os.close(file)


def _read(file: Path) -> list[Any]:
    """Read the value that another process stored in `file`, as a list with one item.

    The list is empty if no value can be read.
    """
    with suppress(OSError, EOFError, pickle.UnpicklingError):
        return [pickle.loads(file.read_bytes())]
    return []


def _write(file: Path, value: list[Any]) -> None:
    """Store the only item of the list `value` in `file`, for the other processes of the node.

    If there is no room, a warning is logged and nothing is stored. Each of the other processes then computes the value
    itself.
    """
    new = file.with_name(f"{file.name}.{os.getpid()}.new")
    try:
        new.write_bytes(pickle.dumps(value[0], protocol=pickle.HIGHEST_PROTOCOL))
        new.replace(file)
    except OSError as error:
        new.unlink(missing_ok=True)
        log.warning("no room for a value that processes share: %s", error)


def _prune(folder: Path) -> None:
    files = list(folder.iterdir())
    if len(files) >= 2 * MOST_RULES:
        with suppress(FileNotFoundError):  # another process removes the same files
            aged = sorted((file.stat().st_mtime_ns, file) for file in files)
            for _, file in aged[:-MOST_RULES]:
                file.unlink(missing_ok=True)


def _prune_to(folder: Path, most_bytes: int) -> None:
    """Remove the oldest files of `folder` until the others have at most `most_bytes`; the newest file stays."""
    with suppress(FileNotFoundError):  # another process removes the same files
        aged = sorted((file.stat().st_mtime_ns, file.stat().st_size, file) for file in folder.iterdir())
        total = sum(size for _, size, _ in aged)
        for _, size, file in aged[:-1]:
            if total <= most_bytes:
                return
            file.unlink(missing_ok=True)
            total -= size
