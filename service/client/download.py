"""Unpacks the tar stream of a downloaded model into a directory.

The model's directory appears complete or not at all; nothing else is written. The archive is not trusted: only folders
and ordinary files below a single folder are accepted.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from service.disk import gib, lack_of_space
from service.errors import Conflict, InvalidAnswer

__all__ = ["Received", "check_free", "counted", "unpack"]

BLOCK_BYTES = 2**20

Received = Callable[[int, int | None], None]
"""Callback of a download, with the bytes received so far and the total size of all files in bytes (None: unknown)."""


def check_free(out: Path, num_bytes: int | None = None) -> None:
    """Check that the directory `out` does not exist, and that its disk has `num_bytes` free (None: unknown size).

    Raises:
        Conflict: `out` exists, or its disk is too small.
    """
    if out.exists() or out.is_symlink():
        raise Conflict(f"{out}: exists already; give a directory that does not")
    if num_bytes is not None and (problem := lack_of_space(out, num_bytes)):
        raise Conflict(problem)


def unpack(chunks: Iterable[bytes], out: Path, *, num_bytes: int | None = None) -> Path:
    """Unpack a tar archive that contains one folder, and name the folder `out`, which must not exist.

    The folder is unpacked next to `out` and renamed at the end. After an error nothing is left behind.

    Args:
        chunks: Bytes of the archive.
        out: New directory.
        num_bytes: Size of all files together; None if it is not known.

    Returns:
        The absolute path of `out`.

    Raises:
        Conflict: `out` exists, or the disk is too small.
        InvalidAnswer: The archive is incomplete, has another size, or has entries other than files in one folder.
    """
    out = out.absolute()
    check_free(out, num_bytes)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as temporary:
        folder = _unpack_into(Path(temporary), chunks, num_bytes)
        check_free(out)
        folder.rename(out)
    return out


def _unpack_into(directory: Path, chunks: Iterable[bytes], num_bytes: int | None) -> Path:
    """Unpack a tar archive into the temporary `directory`, and return the single folder of the archive in it.

    `chunks` are the bytes of the archive. `num_bytes` is the expected total size of the files; None if it is unknown.
    Raises InvalidAnswer if the archive is not as expected, and Conflict if the files cannot be written.
    """
    names: list[str] = []
    written = 0
    try:
        # As a stream: read forwards only, with one block in memory.
        with tarfile.open(fileobj=_Chunks(chunks), mode="r|", bufsize=BLOCK_BYTES) as archive:
            for member in archive:
                name, *parts = _parts(member)
                names = names or [name]
                if name not in names:
                    raise InvalidAnswer(f"archive: {member.name!r} is not in the folder {names[0]!r}")
                target = directory.joinpath(name, *parts)
                if member.isdir():
                    target.mkdir(parents=True, exist_ok=True)
                    continue
                written += member.size
                if num_bytes is not None and written > num_bytes:
                    raise InvalidAnswer(f"archive: holds more than the {num_bytes} bytes announced")
                target.parent.mkdir(parents=True, exist_ok=True)
                source = archive.extractfile(member)
                assert source is not None
                with source, target.open("xb") as file:
                    shutil.copyfileobj(source, file, BLOCK_BYTES)
    except (FileExistsError, NotADirectoryError) as error:
        raise InvalidAnswer(f"archive: holds {Path(error.filename).relative_to(directory)} twice") from error
    except tarfile.TarError as error:
        raise InvalidAnswer(f"archive: cannot be read: {error}") from error
    except OSError as error:  # the disk is full, or a name is too long
        raise Conflict(f"{directory.parent}: cannot be written: {error.strerror}, after {gib(written)}") from error
    if not names:
        raise InvalidAnswer("archive: is empty")
    if num_bytes is not None and written != num_bytes:
        raise InvalidAnswer(
            f"archive: cut off after {gib(written)} of {gib(num_bytes)} ({written} of {num_bytes} bytes)"
        )
    return directory / names[0]


def _parts(member: tarfile.TarInfo) -> tuple[str, ...]:
    """Split the path of a member of a tar archive into its parts, after checking that the member is safe to unpack.

    Raises:
        InvalidAnswer: The path leads out of the archive's folder, or the member is neither a folder nor an ordinary
            file.
    """
    parts = PurePosixPath(member.name).parts
    if not parts or member.name.startswith("/") or ".." in parts or not {"\\", "\0"}.isdisjoint(member.name):
        raise InvalidAnswer(f"archive: {member.name!r} leads out of its folder; nothing was unpacked")
    if member.issparse() or not (member.isdir() or member.isreg()):
        raise InvalidAnswer(f"archive: {member.name!r} is neither a folder nor an ordinary file; nothing was unpacked")
    if member.isreg() and len(parts) == 1:
        raise InvalidAnswer(f"archive: {member.name!r} is not in a folder; nothing was unpacked")
    return parts


def counted(
    chunks: Iterator[bytes], num_bytes: int | None, received: Received | None, stop: threading.Event
) -> Iterator[bytes]:
    """Yield the `chunks` of a download, and report its progress.

    After each chunk, `received` is called with the number of bytes received so far and the total number `num_bytes`
    (None if unknown). If `received` is None, nothing is reported.

    Raises:
        InterruptedError: Another thread has cancelled the download by setting `stop`.
    """
    count = 0
    for chunk in chunks:
        if stop.is_set():
            raise InterruptedError("the download was cancelled")
        count += len(chunk)
        if received is not None:
            received(count, num_bytes)
        yield chunk


class _Chunks(io.RawIOBase):
    """File object that reads the concatenation of the byte strings `chunks`, for `tarfile`."""

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self._chunks = iter(chunks)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count
