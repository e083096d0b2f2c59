"""Metadata-only snapshots: the files of a hub model without the contents of its weights.

A snapshot is a directory with the model's small files and, for each file of weights, one that begins with the real
file's header, has its size, and is sparse after the header. Code that reads configurations and headers works on it as
on the model. A snapshot is of one commit and never changes. The files are not interpreted here.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from workers.cache import cache_dir
from workers.errors import InvalidModel
from workers.models.headers import MAX_HEADER_BYTES
from workers.models.hub.errors import HubUnusable

__all__ = [
    "TIMEOUT_S",
    "SnapshotRecord",
    "is_metadata_only",
    "make_snapshot",
    "named",
    "read_record",
    "stated_hash",
]

# The file in a snapshot that holds its SnapshotRecord.
RECORD = "hub.json"

# Most headers fit into this; a longer one takes a second request.
FIRST_BYTES = 2**16

# How long a request waits for the hub, and how many headers are requested at once.
TIMEOUT_S = 10.0
CONNECTIONS = 8


@dataclass(frozen=True)
class SnapshotRecord:
    """Description of a metadata-only snapshot, which has a hub model's files without the contents of the weights.

    It lists the model's files, and the sizes and sha256 (hex) of the weights as the hub states them.
    """

    name: str
    revision: str
    commit: str
    small_files: tuple[str, ...]
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]


def is_metadata_only(directory: Path) -> bool:
    """Whether `directory` is a metadata-only snapshot, which has no weights; `downloads.fetched` downloads them."""
    return directory.is_relative_to(snapshots_dir()) and (directory / RECORD).is_file()


def stated_hash(file: Path) -> str | None:
    """The sha256 (hex) that the hub states for a weights file of which only the header was downloaded.

    Returns None for files that are complete. Raises InvalidModel if the hub states no hash.
    """
    if not is_metadata_only(file.parent):
        return None
    record = read_record(file.parent)
    if file.name in record.sizes and file.name not in record.hashes:
        raise InvalidModel(
            (f"{named(str(file))}: the hub does not state its sha256; download it with `hf download {record.name}`",)
        )
    return record.hashes.get(file.name)


def named(text: str) -> str:
    """Replace directories of hub models without weights, in a text, by model and commit (owner/name@commit).

    Such directories, metadata-only snapshots, have names that mean nothing to users.
    """
    return text.replace(f"{snapshots_dir()}{os.sep}", "")


def snapshots_dir() -> Path:
    return cache_dir().resolve() / "hub"


def read_record(directory: Path) -> SnapshotRecord:
    return SnapshotRecord(**json.loads((directory / RECORD).read_bytes()))


def make_snapshot(record: SnapshotRecord, snapshot: Path, pickles: Iterable[str]) -> Path:
    """Create the metadata-only snapshot that `record` describes, if it does not exist yet, and return its directory.

    It has the model's files without the contents of the weights.
    """
    place = snapshots_dir() / f"{record.name}@{record.commit}"
    if is_metadata_only(place):
        return place
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        headers = list(pool.map(lambda file: _header(record, file), record.sizes))
    place.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".", ignore_cleanup_errors=True) as temporary:
        made = Path(temporary) / place.name
        made.mkdir()
        for file in record.small_files:
            shutil.copyfile(snapshot / file, made / file)
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


def _header(record: SnapshotRecord, file: str) -> bytes:
    """Download the safetensors header of a file, with the length in front of it.

    Returns only the first bytes if the file cannot be a safetensors file.
    """
    size = record.sizes[file]
    start = _range(record, file, 0, min(size, FIRST_BYTES))
    end = 8 + int.from_bytes(start[:8], "little")
    if end > size or end > 8 + MAX_HEADER_BYTES:
        return start[:8]
    return start[:end] + _range(record, file, len(start), end)


def _range(record: SnapshotRecord, file: str, begin: int, end: int) -> bytes:
    """Download only the bytes [begin, end) of a file on the hub."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    if begin >= end:
        return b""
    headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}", "accept-encoding": "identity"}
    url = hf_hub_url(record.name, file, revision=record.commit)
    with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise HubUnusable(
                f"it does not send parts of files (status {response.status_code} for a range of {file}), so weights "
                f"cannot be checked before they are downloaded; download them with `hf download {record.name}`"
            )
        found = bytearray()
        for part in response.iter_bytes():
            found += part
            if len(found) >= end - begin:
                break
    if len(found) < end - begin:
        raise HubUnusable(f"it sent {len(found)} of the bytes {begin} to {end - 1} of {file}")
    return bytes(found[: end - begin])
