"""Models in object stores: what a folder has, parts of its files, downloads to this machine.

A folder is listed whenever its model is located; the names, sizes and version tags in the listing make its commit. Its
files are downloaded once per machine, to a directory of that commit:

    CACHE/models/s3:/BUCKET/FOLDER@COMMIT/    the files; weights have their names once their sha256 is checked
    CACHE/models/s3:/BUCKET/FOLDER.latest     the commit that was last located, for when the store does not answer
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from workers.cache import cache_dir
from workers.directories import sync, write_file
from workers.errors import InvalidModel
from workers.models.remote.model_files import SMALL_FILES, pickles, weight_files
from workers.models.remote.snapshots import SUMS, SnapshotRecord, has_size, make_snapshot, size_text
from workers.object_store import ObjectInfo, ObjectStore, object_url_problem

__all__ = ["Objects", "located"]

# Hexadecimal digits of a commit.
COMMIT_DIGITS = 40

# Files that are downloaded at once.
CONNECTIONS = 4

# A line of the program sha256sum.
_SUM = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


class Objects:
    """Object stores as the origin of models."""

    title = "the object store"
    variable = "MERGESEARCH_CACHE"

    def cache(self) -> Path:
        return _models_dir()

    def place(self, record: SnapshotRecord) -> Path:
        return _place(record.name, record.commit)

    def download(self, record: SnapshotRecord, note: Callable[[str], None], total: int) -> None:
        done = 0
        place = self.place(record)
        for size in _downloaded(ObjectStore(record.name), place, record.sizes, record.hashes):
            done += size
            note(f"Downloaded {size_text(done)} of {size_text(total)}")

    def reason(self, error: Exception, record: SnapshotRecord) -> str:
        return " ".join(str(error).split()) or type(error).__name__


def located(url: str) -> Path:
    """Find the directory of the model in a folder of an object store: the downloaded model, or a snapshot of it.

    If the store does not answer, the version that was last located is used, provided that it is complete on this
    machine. Raises InvalidModel.
    """
    if problem := object_url_problem(url):
        raise InvalidModel((problem,))
    url = url.rstrip("/")
    try:
        return _looked_up(url)
    except OSError as error:
        if (known := _last_located(url)) is not None:
            return known
        raise InvalidModel((f"{url}: cannot be read: {error}",)) from error


def _looked_up(url: str) -> Path:
    objects = ObjectStore(url)
    listed = {name: info for name, info in objects.list().items() if "/" not in name}
    if not listed:
        raise InvalidModel((f"{url}: has no objects; expected config.json, tokenizer files and *.safetensors",))
    commit = _commit(listed)
    place = _place(url, commit)
    sums = _sums(objects.read(SUMS).decode(errors="replace")) if SUMS in listed else {}
    small = sorted(listed.keys() & {*SMALL_FILES})
    for _ in _downloaded(objects, place, {name: listed[name].num_bytes for name in small}, sums):
        pass
    sizes = {name: listed[name].num_bytes for name in weight_files(place, listed) if name in listed}
    with suppress(OSError):  # the cache cannot be written to
        write_file(_latest(url), json.dumps({"commit": commit, "sizes": sizes}))
    if sizes and _is_complete(place, sizes):
        return place
    hashes = {name: sums[name] for name in sizes if name in sums}
    record = SnapshotRecord(url, commit, commit, tuple(small), sizes, hashes)
    return make_snapshot(
        record, place, pickles(listed), lambda file, begin, end: objects.read(file, start=begin, stop=end)
    )


def _last_located(url: str) -> Path | None:
    """The directory of the version of a model that was last located, if it is complete; else None."""
    try:
        known = json.loads(_latest(url).read_bytes())
        place = _place(url, known["commit"])
        return place if known["sizes"] and _is_complete(place, known["sizes"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_complete(place: Path, sizes: Mapping[str, int]) -> bool:
    return all(has_size(place / name, size) for name, size in sizes.items())


def _commit(listed: Mapping[str, ObjectInfo]) -> str:
    """Digest (hex) of the names, sizes and version tags of a folder's objects."""
    content = json.dumps(sorted((name, info.num_bytes, info.tag) for name, info in listed.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:COMMIT_DIGITS]


def _sums(text: str) -> dict[str, str]:
    """The sha256 (hex) of each file, from the output of sha256sum."""
    return {found[2]: found[1] for line in text.splitlines() if (found := _SUM.fullmatch(line.strip()))}


def _downloaded(objects: ObjectStore, place: Path, sizes: Mapping[str, int], sums: Mapping[str, str]) -> Iterator[int]:
    """Download the files that `place` lacks, several at once, and yield the size of each once it is complete.

    Processes of this machine wait for each other, so each file is downloaded once. Raises InvalidModel if a file does
    not have the stated sha256.
    """
    if _is_complete(place, sizes):
        return
    place.mkdir(parents=True, exist_ok=True)
    with _locked(place):
        absent = [name for name, size in sizes.items() if not has_size(place / name, size)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            yield from pool.map(lambda name: _download(objects, name, place / name, sums.get(name)), absent)


def _download(objects: ObjectStore, name: str, file: Path, stated: str | None) -> int:
    """Download one object to `file`, which appears once it is complete and checked, and return its size in bytes."""
    partial = file.with_name(f".{name}.partial")
    try:
        objects.download(name, partial)
        if stated is not None and (found := _sha256(partial)) != stated:
            raise InvalidModel((f"{objects.url}/{name}: its sha256 is {found}, {SUMS} states {stated}",))
        num_bytes = partial.stat().st_size
        sync(partial)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)
    return num_bytes


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _locked(place: Path) -> Iterator[None]:
    """Context that one process of this machine at a time may enter for the directory `place`."""
    with place.with_name(f".{place.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _models_dir() -> Path:
    return cache_dir().resolve() / "models"


def _place(url: str, commit: str) -> Path:
    """The directory for the files of one commit of a model."""
    return _models_dir() / f"{url}@{commit}"


def _latest(url: str) -> Path:
    return _models_dir() / f"{url}.latest"
