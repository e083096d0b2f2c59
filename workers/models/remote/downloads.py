"""Downloads of model weights: the bytes that are missing, free disk space, and the download itself."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Protocol

from workers.cache import cache_dir
from workers.directories import turn_if_writable
from workers.errors import InvalidModel
from workers.models.remote.hub import Hub
from workers.models.remote.objects import Objects
from workers.models.remote.snapshots import SnapshotRecord, has_size, is_metadata_only, read_record, size_text
from workers.object_store import is_object_url
from workers.telemetry.phases import phase

__all__ = ["Origin", "absent_bytes", "fetched", "lack_of_space"]

log = logging.getLogger(__name__)

# Free disk space that a download leaves.
MARGIN_BYTES = 2**30


class Origin(Protocol):
    """Interface of a place from which models are downloaded: the Hugging Face hub or an object store.

    `title` is the name of the place in messages. `variable` is the name of the environment variable that chooses the
    directory for downloads (method `cache`).
    """

    title: str
    variable: str

    def cache(self) -> Path:
        """Directory to which models are downloaded."""

    def place(self, record: SnapshotRecord) -> Path:
        """Directory for the downloaded model that `record` describes; it need not exist yet."""

    def download(self, record: SnapshotRecord, note: Callable[[str], None], total: int) -> None:
        """Download the files of the model that `record` describes, as far as they are not in its directory yet.

        `note` is called with lines about the progress. `total` is the number of bytes to download, for these lines.
        """

    def choose(self, record: SnapshotRecord) -> None:
        """Record, in the cache, that the downloaded model `record` is the requested revision (branch or tag)."""

    def reason(self, error: Exception, record: SnapshotRecord) -> str:
        """One-line text that says why the download of the model `record` failed with `error`."""


def absent_bytes(directories: Iterable[Path]) -> int:
    """Number of bytes that must still be downloaded for the models in `directories`.

    A model's weights must be downloaded if its metadata are on this machine and its weights are not. The bytes of a
    directory that is given twice are included once.
    """
    return sum(
        sum(_absent_files(read_record(directory)).values())
        for directory in {*directories}
        if is_metadata_only(directory)
    )


def fetched(directories: Sequence[Path], *, note: Callable[[str], None] = log.info) -> tuple[Path, ...]:
    """Download the weights of models in `directories` if only the models' metadata are on this machine.

    Returns the directories in the same order. A directory without weights is replaced by the directory of the
    downloaded model at the same commit. Complete files are kept if a download is interrupted. `note` is called with
    lines about the progress. Raises InvalidModel if a download fails, or if the cache's disk is too small, in which
    case nothing is downloaded.
    """
    if lack := lack_of_space(directories):
        raise InvalidModel((lack,))
    records = {directory: read_record(directory) for directory in directories if is_metadata_only(directory)}
    found = {directory: _fetch(record, note) for directory, record in records.items()}
    return tuple(found.get(directory, directory) for directory in directories)


def _fetch(record: SnapshotRecord, note: Callable[[str], None]) -> Path:
    origin = _origin(record)
    if _is_complete(record):
        origin.choose(record)
        return origin.place(record)
    try:
        # One process of the machine downloads a model; the others find it when it is complete.
        with turn_if_writable(cache_dir() / "downloads" / f"{record.name.replace('/', '--')}@{record.commit[:12]}"):
            total = sum(_absent_files(record).values())
            with phase(f"downloads {record.name}") if total else nullcontext():
                if total:
                    note(f"Downloading {record.name}@{record.commit[:12]} from {origin.title}: {size_text(total)} ...")
                origin.download(record, note, total)
    except Exception as error:
        reason = origin.reason(error, record)
        raise InvalidModel(
            (
                f"{record.name}: its weights cannot be downloaded: {reason}; complete files are kept, the same command "
                "downloads the others",
            )
        ) from error
    return origin.place(record)


def _is_complete(record: SnapshotRecord) -> bool:
    """Whether all files of the model `record` are on this machine, so that nothing needs to be downloaded or locked."""
    place = _origin(record).place(record)
    has_small_files = all((place / file).is_file() for file in record.small_files)
    return not record.is_outline and has_small_files and not _absent_files(record)


def _absent_files(record: SnapshotRecord) -> dict[str, int]:
    """Size in bytes of each weight file of the model `record` that is not on this machine yet, keyed by file name."""
    if record.is_outline:
        return {}
    place = _origin(record).place(record)
    return {file: size for file, size in record.sizes.items() if not has_size(place / file, size)}


def _origin(record: SnapshotRecord) -> Origin:
    return Objects() if is_object_url(record.name) else Hub()


def lack_of_space(directories: Iterable[Path]) -> str | None:
    """Error text if a disk is too small to download the weights of the models in `directories`; None otherwise.

    Only directories without the contents of the weights (metadata-only snapshots) need a download. The downloads go to
    the caches of the Hugging Face hub and of object stores, on whose disks MARGIN_BYTES must remain free.
    """
    records = [read_record(directory) for directory in sorted({*directories}) if is_metadata_only(directory)]
    for origin in (Hub(), Objects()):
        absent = [record for record in records if type(_origin(record)) is type(origin)]
        num_bytes = sum(sum(_absent_files(record).values()) for record in absent)
        place = origin.cache()
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if num_bytes and num_bytes + MARGIN_BYTES > free:
            names = ", ".join(record.name for record in absent)
            return (
                f"{names}: {size_text(num_bytes)} are to be downloaded to {origin.cache()}, whose disk has "
                f"{size_text(free)} free; make room, or set {origin.variable} to a directory on another disk"
            )
    return None
