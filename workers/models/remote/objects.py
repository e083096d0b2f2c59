"""Models in object stores: what a model consists of, parts of its files, downloads to this machine.

A model is a folder, or an artifact of the service: the URL of a manifest, {"path": {"digest": ..., "bytes": ...}},
beside the files that it names by their sha256. A model is listed whenever it is located; the names, sizes and version
tags in the listing make its commit. Its files are downloaded once per machine, to a directory of that commit:

    CACHE/models/s3:/BUCKET/FOLDER@COMMIT/    the files; weights have their names once their sha256 is checked
    CACHE/models/s3:/BUCKET/FOLDER.latest     the commit that was last located, for when the store does not answer
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from workers.cache import cache_dir
from workers.directories import sync, turn, write_file
from workers.errors import InvalidModel
from workers.models.remote.model_files import SMALL_FILES, pickles, weight_files
from workers.models.remote.snapshots import SUMS, SnapshotRecord, has_size, make_snapshot, size_text
from workers.object_store import ObjectStore, ObjectStoreError, blob_path, blobs_in, object_url_problem

__all__ = ["Objects", "located"]

# Hexadecimal digits of a commit.
COMMIT_DIGITS = 40

# Files that are downloaded at once.
CONNECTIONS = 4

# A line of the program sha256sum.
_SUM = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


@dataclass(frozen=True)
class _File:
    """A file of a model: its path in the object store, size in bytes, version tag, and stated sha256 (hex), if any."""

    path: str
    num_bytes: int
    tag: str
    sha256: str | None


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
        objects, files = _listed(record.name)
        if _commit(files) != record.commit:
            raise ObjectStoreError("its objects have changed since they were checked")
        for size in _downloaded(objects, self.place(record), {name: files[name] for name in record.sizes}):
            done += size
            note(f"Downloaded {size_text(done)} of {size_text(total)}")

    def reason(self, error: Exception, record: SnapshotRecord) -> str:
        return " ".join(str(error).split()) or type(error).__name__


def located(url: str) -> Path:
    """Find the directory of the model in the folder `url` of an object store.

    It is the downloaded model, or else a metadata-only snapshot, which has the model's files without the contents of
    the weights. If the store does not answer, the version that was last located is used, provided that it is complete
    on this machine. Raises InvalidModel if the URL is invalid or the model cannot be read.
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
    objects, files = _listed(url)
    if not files:
        raise InvalidModel((f"{url}: has no objects; expected config.json, tokenizer files and *.safetensors",))
    commit = _commit(files)
    place = _place(url, commit)
    small = sorted(files.keys() & {*SMALL_FILES})
    for _ in _downloaded(objects, place, {name: files[name] for name in small}):
        pass
    sizes = {name: files[name].num_bytes for name in weight_files(place, files) if name in files}
    with suppress(OSError):  # the cache cannot be written to
        write_file(_latest(url), json.dumps({"commit": commit, "sizes": sizes}))
    if sizes and _is_complete(place, sizes):
        return place
    hashes = {name: stated for name in sizes if (stated := files[name].sha256) is not None}
    record = SnapshotRecord(url, commit, commit, tuple(small), sizes, hashes)

    def read(name: str, begin: int, end: int) -> bytes:
        return objects.read(files[name].path, start=begin, stop=end)

    return make_snapshot(record, place, pickles(files), read)


def _listed(url: str) -> tuple[ObjectStore, dict[str, _File]]:
    """The object store that has the model at `url`, and the model's files by name, without those in subfolders."""
    if artifacts := blobs_in(url):
        ((store, digest),) = artifacts
        return _manifest(ObjectStore(store), digest)
    objects = ObjectStore(url)
    listed = {name: info for name, info in objects.list().items() if "/" not in name}
    sums = _sums(objects.read(SUMS).decode(errors="replace")) if SUMS in listed else {}
    return objects, {name: _File(name, info.num_bytes, info.tag, sums.get(name)) for name, info in listed.items()}


def _manifest(objects: ObjectStore, digest: str) -> tuple[ObjectStore, dict[str, _File]]:
    """The store, and the files by name, of the artifact of the service whose manifest has the sha256 `digest`.

    Raises InvalidModel if the stored manifest has another sha256.
    """
    content = objects.read(blob_path(digest))
    if hashlib.sha256(content).hexdigest() != digest:
        raise InvalidModel((f"{objects.url}/{blob_path(digest)}: its content has changed since it was stored",))
    manifest = {name: entry for name, entry in json.loads(content).items() if "/" not in name}
    return objects, {
        name: _File(blob_path(entry["digest"]), entry["bytes"], entry["digest"], entry["digest"])
        for name, entry in manifest.items()
    }


def _last_located(url: str) -> Path | None:
    """The directory of the version of the model `url` that was last located.

    Returns None if no version was located, or if not all of its files are on this machine.
    """
    try:
        known = json.loads(_latest(url).read_bytes())
        place = _place(url, known["commit"])
        return place if known["sizes"] and _is_complete(place, known["sizes"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _is_complete(place: Path, sizes: Mapping[str, int]) -> bool:
    return all(has_size(place / name, size) for name, size in sizes.items())


def _commit(files: Mapping[str, _File]) -> str:
    """The commit of a model in an object store: a digest (hex) of the names, sizes and version tags of its files."""
    content = json.dumps(sorted((name, file.num_bytes, file.tag) for name, file in files.items()))
    return hashlib.sha256(content.encode()).hexdigest()[:COMMIT_DIGITS]


def _sums(text: str) -> dict[str, str]:
    """The sha256 (hex) of each file by name, from the output of sha256sum; other lines of `text` are ignored."""
    return {found[2]: found[1] for line in text.splitlines() if (found := _SUM.fullmatch(line.strip()))}


def _downloaded(objects: ObjectStore, place: Path, files: Mapping[str, _File]) -> Iterator[int]:
    """Download the files that `place` lacks, several at once, and yield the size of each once it is complete.

    Processes of this machine wait for each other, so each file is downloaded once. Raises InvalidModel if a file does
    not have the stated sha256.
    """
    if _is_complete(place, {name: file.num_bytes for name, file in files.items()}):
        return
    place.mkdir(parents=True, exist_ok=True)
    with turn(place):
        absent = [name for name, file in files.items() if not has_size(place / name, file.num_bytes)]
        with ThreadPoolExecutor(CONNECTIONS) as pool:
            yield from pool.map(lambda name: _download(objects, files[name], place / name), absent)


def _download(objects: ObjectStore, source: _File, file: Path) -> int:
    """Download one object to `file`, which appears once it is complete and checked, and return its size in bytes."""
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


def _models_dir() -> Path:
    return cache_dir().resolve() / "models"


def _place(url: str, commit: str) -> Path:
    """The directory on this machine for the files of one commit of the model at `url`."""
    return _models_dir() / f"{url}@{commit}"


def _latest(url: str) -> Path:
    return _models_dir() / f"{url}.latest"
