"""Downloads of files from object stores to this machine, each file once."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from workers.directories import sync, turn
from workers.errors import InvalidModel
from workers.models.remote.snapshots import has_size
from workers.object_store import ObjectStore

__all__ = ["VERSION_DIGITS", "ObjectFile", "downloaded", "is_complete", "version_of"]

# Hexadecimal digits of a version.
VERSION_DIGITS = 40

# Files that are downloaded at once.
CONNECTIONS = 4


@dataclass(frozen=True)
class ObjectFile:
    """A file in an object store: path, size in bytes, version tag, and sha256 (hex; None if the store states none)."""

    path: str
    num_bytes: int
    tag: str
    sha256: str | None = None


def version_of(files: Mapping[str, ObjectFile]) -> str:
    """Version of a set of files: a digest (hex) of their names, sizes, and version tags in the object store."""
    content = json.dumps(sorted((name, file.num_bytes, file.tag) for name, file in files.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:VERSION_DIGITS]


def is_complete(place: Path, sizes: Mapping[str, int]) -> bool:
    """Whether the directory `place` has all files, with the given sizes in bytes."""
    return all(has_size(place / name, size) for name, size in sizes.items())


def downloaded(objects: ObjectStore, place: Path, files: Mapping[str, ObjectFile]) -> Iterator[int]:
    """Download the files that `place` lacks, several at once, and yield the size of each once it is complete.

    `objects` is the object store, and `files` has the files, keyed by their names in the directory `place`. Processes
    of this machine wait for each other, so each file is downloaded once. Raises InvalidModel if a file does not have
    the stated sha256.
    """
    if is_complete(place, {name: file.num_bytes for name, file in files.items()}):
        return
    place.mkdir(parents=True, exist_ok=True)
    with turn(place):
        absent = [name for name, file in files.items() if not has_size(place / name, file.num_bytes)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            yield from pool.map(lambda name: _download(objects, files[name], place / name), absent)


def _download(objects: ObjectStore, source: ObjectFile, file: Path) -> int:
    """Download the object `source` of the store `objects` to `file`, and return its size in bytes.

    `file` appears only after its content is checked. Raises InvalidModel if the content does not have the stated
    sha256.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    try:
        objects.download(source.path, partial)
        if source.sha256 is not None and (found := _sha256(partial)) != source.sha256:
            stated = f"its stated sha256 is {source.sha256}"
            raise InvalidModel((f"{objects.url}/{source.path}: its content has the sha256 {found}; {stated}",))
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return source.num_bytes


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
