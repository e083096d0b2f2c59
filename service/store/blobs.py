"""Content-addressed files: each is named by its sha256 (hex) and never changes.

A file appears under its name only when it is complete. Storing content that is stored already has no effect.
"""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol
from urllib.parse import unquote, urlsplit

from service.disk import existing
from service.errors import Conflict
from workers.directories import replacing, write_file
from workers.object_store import ObjectStore, blob_path, is_object_url, object_url_problem

__all__ = [
    "BLOBS",
    "BlobStore",
    "DirectoryBlobs",
    "ObjectBlobs",
    "StoredFile",
    "check_location",
    "digest_of",
    "open_blobs",
]

# Folder of the stored files in a directory or object store.
BLOBS, LOCK = "blobs", ".lock"

# Unused objects are deleted this many seconds after they were written. Until then a writer may be about to name them.
GRACE_S = 24 * 3600.0


class BlobStore(Protocol):
    """Interface of content-addressed stores of files, in which a file is named by the sha256 of its content.

    Several processes may use a store at the same time. `place` is the text that names the store in messages.
    """

    @property
    def place(self) -> str: ...

    @property
    def remote(self) -> str | None:
        """URL of the object store with the files; None if the files are in a directory."""

    def add(self, file: Path) -> tuple[str, int]:
        """Copy a file to the store, and return its digest (the sha256 of its content) and its size in bytes.

        Raises Conflict if the file changes while it is copied.
        """

    def add_bytes(self, content: bytes) -> str:
        """Store a file with the content `content`, and return its digest, the sha256 of the content."""

    def read(self, digest: str) -> bytes:
        """Content of the stored file with the given digest (sha256). Raises FileNotFoundError if there is no file."""

    def copy(self, digest: str, target: Path) -> None:
        """Copy the stored file with the given digest (sha256) to the new file `target`.

        Raises FileNotFoundError if there is no stored file with the digest.
        """

    def stored(self, digest: str) -> StoredFile | None:
        """Find the stored file with the given digest (sha256), as an object that opens it; None if there is no file."""

    def num_bytes(self) -> int:
        """Total size in bytes of all stored files."""

    def capacity(self) -> int | None:
        """Size in bytes of the disk that holds the files; None for an object store, whose size has no limit."""

    def check(self) -> None:
        """Check that files can be stored, listed, read and deleted in this store. Raises OSError otherwise."""

    def storing(self) -> AbstractContextManager[None]:
        """Context in which a process stores files, and then the database rows that name them.

        Files that are stored in the context are not deleted as unused before it ends, neither by this process nor by
        others: the method `collect` keeps them.
        """

    def collect(self, used: Callable[[], Collection[str]], *, deletes: bool = True) -> int:
        """Delete the stored files whose digests are not in `used()`, and return the number of bytes freed.

        `used` returns the digests of the files that the database names. A file whose digest another process may be
        about to store in the database is kept. A later call deletes it if it is still unused. If `deletes` is False,
        nothing is deleted, and the result is the number of bytes that would be freed.
        """


@dataclass(frozen=True)
class StoredFile:
    """A file in a content-addressed store: its size in bytes, and where its content is read from.

    `source` is a path on this machine, or an object store and the file's path in it.
    """

    num_bytes: int
    source: Path | tuple[ObjectStore, str]

    @classmethod
    def of(cls, file: Path) -> StoredFile:
        """Make the `StoredFile` whose content is read from the path `file` on this machine."""
        return cls(file.stat().st_size, file)

    def open(self) -> BinaryIO:
        """Open the file for sequential reading, from this machine's disk or from the object store."""
        if isinstance(self.source, Path):
            return self.source.open("rb")
        objects, path = self.source
        return objects.open(path)


def open_blobs(location: str | Path) -> BlobStore:
    """Return the content-addressed store of files at `location`.

    `location` is a directory, a file URL, or the URL of an object store. Raises Conflict if `location` has another
    form.
    """
    text = str(location)
    if is_object_url(text):
        if problem := object_url_problem(text):
            raise Conflict(problem)
        return ObjectBlobs(ObjectStore(text))
    if text.startswith("file://"):
        return DirectoryBlobs(Path(unquote(urlsplit(text).path)))
    if "://" in text:
        raise Conflict(f"{text!r}: expected a directory, file:///DIRECTORY, s3://BUCKET/FOLDER or gs://BUCKET/FOLDER")
    return DirectoryBlobs(Path(location))


def check_location(location: str | Path) -> None:
    """Check that files can be stored, listed, read and deleted at `location`.

    Raises:
        Conflict: `location` is neither a directory nor the URL of a directory or an object store, or one of these
            operations fails there; the message says which.
    """
    blobs = open_blobs(location)
    try:
        blobs.check()
    except OSError as error:
        raise Conflict(f"files at {location}: {error}") from error


class DirectoryBlobs:
    """Content-addressed store of files in a directory of this machine or of a shared file system.

    `DIR/blobs/ab/cdef...` is the file whose sha256 is abcdef.... Processes lock the file `DIR/.lock`: shared while they
    store files, and exclusively while they delete unused files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._blobs = directory / BLOBS

    @property
    def place(self) -> str:
        return str(self._blobs)

    @property
    def remote(self) -> str | None:
        return None

    def add(self, file: Path) -> tuple[str, int]:
        digest = digest_of(file)
        if not self._file(digest).exists():
            with replacing(self._file(digest)) as new:
                shutil.copyfile(file, new)
                _check_unchanged(file, digest_of(new), digest)
        return digest, file.stat().st_size

    def add_bytes(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        write_file(self._file(digest), content)
        return digest

    def read(self, digest: str) -> bytes:
        return self._file(digest).read_bytes()

    def copy(self, digest: str, target: Path) -> None:
        shutil.copyfile(self._file(digest), target)

    def stored(self, digest: str) -> StoredFile | None:
        file = self._file(digest)
        return StoredFile.of(file) if file.is_file() else None

    def num_bytes(self) -> int:
        found = 0
        for file in self._blobs.glob("*/*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                found += file.stat().st_size
        return found

    def capacity(self) -> int | None:
        return shutil.disk_usage(existing(self._directory)).total

    def check(self) -> None:
        self._blobs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._directory):
            pass

    def storing(self) -> AbstractContextManager[None]:
        return self._locked(fcntl.LOCK_SH)

    def collect(self, used: Callable[[], Collection[str]], *, deletes: bool = True) -> int:
        try:
            with self._locked(fcntl.LOCK_EX | fcntl.LOCK_NB):
                return self._collect(used(), deletes=deletes)
        except BlockingIOError:  # files are being stored
            return 0

    def _collect(self, used: Collection[str], *, deletes: bool) -> int:
        freed = 0
        for file in list(self._blobs.glob("*/*")):
            if file.parent.name + file.name not in used:
                freed += file.stat().st_size
                if deletes:
                    file.unlink(missing_ok=True)
        return freed

    @contextmanager
    def _locked(self, operation: int) -> Iterator[None]:
        self._directory.mkdir(parents=True, exist_ok=True)
        with (self._directory / LOCK).open("a+") as file:  # NFSv4 refuses shared locks on files that cannot be read
            fcntl.flock(file, operation)
            yield

    def _file(self, digest: str) -> Path:
        return self._blobs / digest[:2] / digest[2:]


class ObjectBlobs:
    """Content-addressed store of files in an object store; the file whose sha256 is abcdef... is URL/blobs/ab/cdef....

    `objects` is the object store, which has no locks. Unused files are therefore deleted only `GRACE_S` (24 h) after
    they were written. If a process stores a file that exists already and is older than half of `GRACE_S`, the file is
    written again. The file is then not deleted before the process has stored its digest in the database.
    """

    def __init__(self, objects: ObjectStore) -> None:
        self._objects = objects

    @property
    def place(self) -> str:
        return f"{self._objects.url}/{BLOBS}"

    @property
    def remote(self) -> str | None:
        return self._objects.url

    def add(self, file: Path) -> tuple[str, int]:
        digest, num_bytes = digest_of(file), file.stat().st_size
        if not self._is_fresh(digest):
            self._objects.upload(file, blob_path(digest))
            _check_unchanged(file, digest_of(file), digest)
        return digest, num_bytes

    def add_bytes(self, content: bytes) -> str:
        digest = hashlib.sha256(content).hexdigest()
        if not self._is_fresh(digest):
            self._objects.write(blob_path(digest), content)
        return digest

    def read(self, digest: str) -> bytes:
        return self._objects.read(blob_path(digest))

    def copy(self, digest: str, target: Path) -> None:
        self._objects.download(blob_path(digest), target)

    def stored(self, digest: str) -> StoredFile | None:
        info = self._objects.info(blob_path(digest))
        return None if info is None else StoredFile(info.num_bytes, (self._objects, blob_path(digest)))

    def num_bytes(self) -> int:
        return sum(info.num_bytes for info in self._objects.list(BLOBS).values())

    def capacity(self) -> int | None:
        return None

    def check(self) -> None:
        self._objects.check()

    def storing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def collect(self, used: Callable[[], Collection[str]], *, deletes: bool = True) -> int:
        listed = self._objects.list(BLOBS)  # before SQL is read: files stored since are not in this list
        kept, now, freed = used(), time.time(), 0
        for path, info in listed.items():
            digest = path.removeprefix(f"{BLOBS}/").replace("/", "")
            if digest not in kept and now - info.modified_at > GRACE_S:
                if deletes:
                    self._objects.delete(path)
                freed += info.num_bytes
        return freed

    def _is_fresh(self, digest: str) -> bool:
        info = self._objects.info(blob_path(digest))
        return info is not None and time.time() - info.modified_at < GRACE_S / 2


def digest_of(file: Path) -> str:
    """The sha256 (hex) of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_unchanged(file: Path, now: str, digest: str) -> None:
    if now != digest:
        raise Conflict(f"{file}: changed while it was stored")
