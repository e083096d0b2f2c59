"""Downloads of hub models: how much is missing, whether the disk has room for it, and the download itself."""

from __future__ import annotations

import logging
import re
import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any

from workers.directories import write_file
from workers.errors import InvalidModel
from workers.models.hub.errors import HubUnusable, reason_of
from workers.models.hub.metadata import SnapshotRecord, is_metadata_only, read_record

__all__ = ["COMMIT", "absent_bytes", "download", "fetched", "has_size", "hub_cache", "lack_of_space", "point_to"]

log = logging.getLogger(__name__)

# The id of a commit, which never changes its content.
COMMIT = re.compile("[0-9a-f]{40}")

# Seconds between two notes on a download.
INTERVAL_S = 10.0

# Free disk space that a download leaves.
MARGIN_BYTES = 2**30


def absent_bytes(directories: Iterable[Path]) -> int:
    """Bytes that `fetched` would download for the models in `directories`; a model that is listed twice counts once."""
    return sum(
        sum(_absent_files(read_record(directory)).values())
        for directory in {*directories}
        if is_metadata_only(directory)
    )


def fetched(directories: Sequence[Path], *, note: Callable[[str], None] = log.info) -> tuple[Path, ...]:
    """Download the weights of the models of which only metadata-only snapshots are on this machine.

    Returns the directories, with the downloaded ones in place of the snapshots, at the same commits. Complete files are
    kept if a download is interrupted. `note` is called with lines about the progress. Raises InvalidModel if a download
    fails, or if the cache's disk is too small, in which case nothing is downloaded.
    """
    if lack := lack_of_space(directories):
        raise InvalidModel((lack,))
    records = {directory: read_record(directory) for directory in directories if is_metadata_only(directory)}
    found = {directory: _fetch(record, note) for directory, record in records.items()}
    return tuple(found.get(directory, directory) for directory in directories)


def _fetch(record: SnapshotRecord, note: Callable[[str], None]) -> Path:
    absent = _absent_files(record)
    total = sum(absent.values())
    if absent:
        note(f"Downloading {record.name}@{record.commit[:12]} from the hub: {_size_text(total)} ...")
    try:
        snapshot = download(record.name, record.commit, (*record.small_files, *record.sizes), _notes(note, total))
        if missing := _absent_files(record):
            raise HubUnusable(f"{', '.join(missing)} did not arrive")
    except Exception as error:
        reason = reason_of(error, record.name, record.revision)
        raise InvalidModel(
            (
                f"{record.name}: its weights cannot be downloaded: {reason}; complete files are kept, the same command "
                "downloads the others",
            )
        ) from error
    point_to(snapshot, record.revision)
    return snapshot


def _absent_files(record: SnapshotRecord) -> dict[str, int]:
    """The sizes in bytes, by file, of the weights that the hub's cache on this machine lacks."""
    snapshot = _snapshot_dir(record.name, record.commit)
    return {file: size for file, size in record.sizes.items() if not has_size(snapshot / file, size)}


def _snapshot_dir(name: str, commit: str) -> Path:
    """The directory in the hub's cache for one commit of a model."""
    return hub_cache() / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def hub_cache() -> Path:
    """The directory in which the hub's client library keeps downloads."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def lack_of_space(directories: Iterable[Path]) -> str | None:
    """The reason why the disk has no room for the weights that must be downloaded; None if it has room."""
    absent = sorted({directory for directory in directories if is_metadata_only(directory)})
    num_bytes = absent_bytes(absent)
    place = hub_cache()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if num_bytes == 0 or num_bytes + MARGIN_BYTES <= free:
        return None
    names = ", ".join(read_record(directory).name for directory in absent)
    return (
        f"{names}: {_size_text(num_bytes)} are to be downloaded to "
        f"{hub_cache()}, whose disk has {_size_text(free)} free; make room, or set HF_HUB_CACHE to a directory "
        "on another disk"
    )


def download(name: str, commit: str, files: Sequence[str], progress: type | None = None) -> Path:
    """Download files of one commit of a hub model, and return the directory of this commit in the cache."""
    from huggingface_hub import snapshot_download

    if files:
        snapshot_download(
            name,
            revision=commit,
            allow_patterns=[escape(file) for file in files],
            tqdm_class=progress or _notes(lambda _: None, 0),
        )
    return _snapshot_dir(name, commit)


def point_to(snapshot: Path, revision: str) -> None:
    """Make the branch or tag `revision` in the hub's cache refer to a complete snapshot."""
    reference = snapshot.parents[1] / "refs" / revision
    if COMMIT.fullmatch(revision):
        return
    with suppress(OSError):  # the cache cannot be written to
        if not reference.is_file() or reference.read_text() != snapshot.name:
            write_file(reference, snapshot.name)


def _notes(note: Callable[[str], None], total: int) -> type:
    """Make a progress bar class for the hub's client that calls `note` with lines, in place of drawing a bar."""
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
                note(f"Downloaded {_size_text(self.n)} of {_size_text(total)}")
            return None

    return Notes


def _size_text(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


def has_size(file: Path, size: int | None) -> bool:
    return file.is_file() and file.stat().st_size == size
