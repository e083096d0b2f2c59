"""Models on the Hugging Face hub: queries, partial reads of files, and downloads to the hub client's cache."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from workers.directories import write_file
from workers.models.remote.errors import HubUnusable, reason_of
from workers.models.remote.model_files import NEEDED_FILES, SMALL_FILES, pickles, weight_files
from workers.models.remote.snapshots import SnapshotRecord, has_size, make_snapshot, size_text

__all__ = ["COMMIT", "INTERVAL_S", "Hub", "cached", "hub_cache", "looked_up"]

# The id of a commit; a commit's content never changes.
COMMIT = re.compile("[0-9a-f]{40}")

# Seconds that a request waits for the hub.
TIMEOUT_S = 10.0

# Seconds between two notes on a download.
INTERVAL_S = 10.0

# The hub states a sha256 for all files of more than 10 MB. Weights without one can only be smaller; they are downloaded
# together with the small files.
MAX_PLAIN_BYTES = 10 * 2**20


class Hub:
    """The Hugging Face hub as a place from which models are downloaded (interface `Origin`)."""

    title = "the hub"
    variable = "HF_HUB_CACHE"

    def cache(self) -> Path:
        return hub_cache()

    def place(self, record: SnapshotRecord) -> Path:
        return _snapshot_dir(record.name, record.commit)

    def download(self, record: SnapshotRecord, note: Callable[[str], None], total: int) -> None:
        files = (*record.small_files, *record.sizes)
        snapshot = _download(record.name, record.commit, files, _notes(note, total))
        if missing := [file for file, size in record.sizes.items() if not has_size(snapshot / file, size)]:
            raise HubUnusable(f"{', '.join(missing)} did not arrive")
        self.choose(record)

    def choose(self, record: SnapshotRecord) -> None:
        _point_to(self.place(record), record.revision)

    def reason(self, error: Exception, record: SnapshotRecord) -> str:
        return reason_of(error, record.name, record.revision)


def cached(name: str, revision: str) -> Path | None:
    """Directory of the hub model `name` (owner/name) in the cache of the hub's client; None if files are missing.

    `revision` is a branch, tag or commit.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[*NEEDED_FILES])
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    directory = Path(found)
    weights = weight_files(directory, os.listdir(directory))
    return directory if weights and all((directory / file).is_file() for file in weights) else None


def looked_up(name: str, revision: str) -> Path:
    """Ask the hub for the current commit of model `name` at `revision`, and return a directory for this commit.

    If all files are in the cache of the hub's client, the result is the commit's directory there. Otherwise it is a
    metadata-only snapshot, which has the files without the contents of the weights.
    """
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    if not COMMIT.fullmatch(info.sha or ""):
        raise HubUnusable(f"the hub states the commit {info.sha!r:.80}; expected 40 hex digits")
    files = {file.rfilename: file for file in info.siblings or () if "/" not in file.rfilename}
    small = sorted(files.keys() & {*SMALL_FILES})
    snapshot = _download(name, info.sha, small)
    weights = [file for file in weight_files(snapshot, files) if file in files]
    sizes: dict[str, int] = {file: files[file].size for file in weights}
    if None in sizes.values():
        raise HubUnusable("the hub does not say how large its files are")
    plain = [file for file, size in sizes.items() if files[file].lfs is None and size <= MAX_PLAIN_BYTES]
    _download(name, info.sha, plain)
    sizes = {file: size for file, size in sizes.items() if file not in plain}
    if weights and all(has_size(snapshot / file, size) for file, size in sizes.items()):
        _point_to(snapshot, revision)
        return snapshot
    hashes = {file: stated.sha256 for file in sizes if (stated := files[file].lfs)}
    record = SnapshotRecord(name, revision, info.sha, (*small, *plain), sizes, hashes)
    return make_snapshot(record, snapshot, pickles(files), lambda file, begin, end: _range(record, file, begin, end))


def _snapshot_dir(name: str, commit: str) -> Path:
    """Directory in the hub's cache for one commit of the model `name` (owner/name)."""
    return hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def hub_cache() -> Path:
    """Directory in which the hub's client library keeps downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def _download(name: str, commit: str, files: Sequence[str], progress: type | None = None) -> Path:
    """Download `files` of one commit of the hub model `name`, and return the commit's directory in the hub's cache.

    `progress` is a progress bar class for the hub's client; None shows no progress.
    """
    from huggingface_hub import snapshot_download

    if files:
        snapshot_download(
            name,
            revision=commit,
            allow_patterns=[escape(file) for file in files],
            tqdm_class=progress or _notes(lambda _: None, 0),
        )
    return _snapshot_dir(name, commit)


def _point_to(snapshot: Path, revision: str) -> None:
    """Make the branch or tag `revision` in the hub's cache refer to the commit in `snapshot`.

    Nothing is done if `revision` is a commit, or if the cache cannot be written to.
    """
    reference = snapshot.parents[1] / "refs" / revision
    if COMMIT.fullmatch(revision):
        return
    with suppress(OSError):  # the cache cannot be written to
        if not reference.is_file() or reference.read_text() != snapshot.name:
            write_file(reference, snapshot.name)


def _notes(note: Callable[[str], None], total: int) -> type:
    """Make a class of progress bars for the hub client that call `note` with lines of text instead of drawing.

    `total` is the number of bytes to download, for the lines.
    """
    from huggingface_hub.utils import tqdm

    class Notes(tqdm):  # type: ignore[misc]
        def __init__(self, *args: Any, name: str | None = None, **kwargs: Any) -> None:
            super().__init__(*args, name=name, **{**kwargs, "disable": True})
            self._counts_written = name == "huggingface_hub.snapshot_download"
            self._noted_at = time.monotonic()

        def update(self, n: float | None = 1) -> bool | None:
            self.n += n or 0
            if self._counts_written and time.monotonic() - self._noted_at >= INTERVAL_S:
                self._noted_at = time.monotonic()
                note(f"Downloaded {size_text(self.n)} of {size_text(total)}")
            return None

    return Notes


def _range(record: SnapshotRecord, file: str, begin: int, end: int) -> bytes:
    """Download only the bytes [begin, end) of one file of the hub model that `record` describes.

    Raises HubUnusable if the hub does not send these bytes.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

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
