"""Metadata-only snapshots: the files of a remote model without its weights, which are downloaded later.

A snapshot is a directory with the model's small files. Each file of weights is replaced by a sparse file of the same
size, which has only the header of the real file. Code that reads configurations and headers works on a snapshot as on
the model. A snapshot belongs to one commit and never changes. This module does not interpret the files.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from workers.cache import cache_dir
from workers.errors import InvalidModel
from workers.models.headers import MAX_HEADER_BYTES
from workers.object_store import is_object_url

__all__ = [
    "SUMS",
    "SnapshotRecord",
    "has_size",
    "is_metadata_only",
    "make_snapshot",
    "named",
    "read_record",
    "size_text",
    "stated_hash",
]

# The file in a snapshot that holds its SnapshotRecord.
RECORD = "hub.json"

# The file in a folder of an object store that states the sha256 of the others, in the form of the program sha256sum.
SUMS = "SHA256SUMS"

# Most headers fit into this; a longer one takes a second request.
FIRST_BYTES = 2**16

# Headers that are requested at once.
CONNECTIONS = 8

# The URL of an object store that is part of a directory's path.
_URL_IN_PATH = re.compile(r"\b(s3|gs):/(?=[^/])")


@dataclass(frozen=True)
class SnapshotRecord:
    """Description of a metadata-only snapshot: a directory with a model's files without the weights' contents.

    - `name`: a hub id, or the URL of a folder in an object store
    - `revision`: the branch, tag or commit that was requested
    - `commit`: the version of the files
    - `small_files`: the names of the files other than weights
    - `sizes`, `hashes`: the size in bytes, and the sha256 (hex) that the hub or object store states, of each file of
      weights
    - `is_outline`: whether only the model's configuration is known (module `workers.engines.transformers.outlines`), so
      that the weights cannot be downloaded
    """

    name: str
    revision: str
    commit: str
    small_files: tuple[str, ...]
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]
    is_outline: bool = False


def is_metadata_only(directory: Path) -> bool:
    """Whether `directory` is a metadata-only snapshot: a model's files without the contents of the weights.

    The function `downloads.fetched` downloads the weights.
    """
    return directory.is_relative_to(snapshots_dir()) and (directory / RECORD).is_file()


def stated_hash(file: Path) -> str | None:
    """The sha256 (hex) of a weights file that is not downloaded, as the hub or object store states it.

    Returns None for a downloaded file, whose hash can be computed. Raises InvalidModel if the file is not downloaded
    and no hash is stated.
    """
    if not is_metadata_only(file.parent):
        return None
    record = read_record(file.parent)
    if file.name in record.sizes and file.name not in record.hashes:
        if is_object_url(record.name):
            lack = f"no sha256 is stated for it; add the output of `sha256sum *` to the folder as the file {SUMS}"
        else:
            lack = f"the hub does not state its sha256; download it with `hf download {record.name}`"
        raise InvalidModel((f"{named(str(file))}: {lack}",))
    return record.hashes.get(file.name)


def named(text: str) -> str:
    """Replace each path of a metadata-only snapshot in `text` by the model and its commit (owner/name@commit).

    A metadata-only snapshot is a directory with a model's files without the contents of the weights. Its path means
    nothing to users.
    """
    replaced = text.replace(f"{snapshots_dir()}{os.sep}", "")
    return text if replaced == text else _URL_IN_PATH.sub(r"\1://", replaced)


def snapshots_dir() -> Path:
    return cache_dir().resolve() / "hub"


def read_record(directory: Path) -> SnapshotRecord:
    return SnapshotRecord(**json.loads((directory / RECORD).read_bytes()))


def make_snapshot(
    record: SnapshotRecord, small: Path, pickles: Iterable[str], read: Callable[[str, int, int], bytes]
) -> Path:
    """Create the metadata-only snapshot that `record` describes, unless it exists, and return its directory.

    Such a snapshot has the model's files without the contents of the weights, so that a model can be checked before it
    is downloaded. Weights files have their headers and their sizes. `small` is a directory with the other files.
    `pickles` are names of pickled weights, for which empty files are made. `read(file, begin, end)` returns the bytes
    [begin, end) of a weights file.
    """
    place = snapshots_dir() / f"{record.name}@{record.commit}"
    if is_metadata_only(place):
        return place
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        headers = list(pool.map(lambda file: _header(record.sizes[file], partial(read, file)), record.sizes))
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".", ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / place.name
        made.mkdir()
        for file in record.small_files:
            shutil.copyfile(small / file, made / file)
        for file in pickles:
            (made / file).touch()
        for (file, size), header in zip(record.sizes.items(), headers, strict=True):
            (made / file).write_bytes(header)
            os.truncate(made / file, size)
        (made / RECORD).write_text(json.dumps(asdict(record)))
        with suppress(OSError):  # another process has created it
            made.rename(place)
    if not is_metadata_only(place):
        raise OSError(f"{place}: cannot be written")
    return place


def _header(size: int, read: Callable[[int, int], bytes]) -> bytes:
    """Read the safetensors header of a file of `size` bytes, including the length that precedes it.

    `read` returns the bytes [begin, end) of the file. Returns only the first 8 bytes, the length, if the file cannot be
    a safetensors file.
    """
    start = read(0, min(size, FIRST_BYTES))
    end = 8 + int.from_bytes(start[:8], "little")
    if end > size or end > 8 + MAX_HEADER_BYTES:
        return start[:8]
    return start[:end] + (read(len(start), end) if end > len(start) else b"")


def has_size(file: Path, size: int | None) -> bool:
    """Whether a file exists and has `size` bytes; False if `size` is None."""
    return file.is_file() and file.stat().st_size == size


def size_text(num_bytes: float) -> str:
    """Format a number of bytes (`num_bytes`) as text in MiB or GiB."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"
