"""Models in object stores: their files, partial reads, and downloads to this machine.

A model is a folder, or an artifact of the service: a set of files that are stored by content. The URL of an artifact is
the URL of its manifest, {"path": {"digest": ..., "bytes": ...}}. Next to the manifest are the files, each named by its
sha256. A model's files are listed whenever the model is located; the names, sizes and version tags in the listing
determine the commit of the model. A model's files are downloaded once per machine, to a directory of that commit:

    CACHE/models/s3:/BUCKET/FOLDER@COMMIT/    the files; weights have their names once their sha256 is checked
    CACHE/models/s3:/BUCKET/FOLDER.latest     the commit last located, used if the store does not answer
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from workers.cache import cache_dir
from workers.directories import write_file
from workers.errors import InvalidModel
from workers.models.remote.files import ObjectFile, downloaded, is_complete, version_of
from workers.models.remote.model_files import SMALL_FILES, pickles, weight_files
from workers.models.remote.snapshots import SUMS, SnapshotRecord, make_snapshot, size_text
from workers.object_store import ObjectStore, ObjectStoreError, blob_at, blob_path, object_url_problem

__all__ = ["Objects", "located"]

# A line of the program sha256sum.
_SUM = re.compile(r"([0-9a-f]{64}) [ *](?:\./)?(.+)")


class Objects:
    """Object stores as a place from which models are downloaded (interface `Origin`)."""

    title = "the object store"
    variable = "MERGESEARCH_CACHE"

    def cache(self) -> Path:
        return _models_dir()

    def place(self, record: SnapshotRecord) -> Path:
        return _place(record.name, record.commit)

    def download(self, record: SnapshotRecord, note: Callable[[str], None], total: int) -> None:
        done = 0
        objects, files = _listed(record.name)
        if version_of(files) != record.commit:
            raise ObjectStoreError("its objects have changed since they were checked")
        for size in downloaded(objects, self.place(record), {name: files[name] for name in record.sizes}):
            done += size
            note(f"Downloaded {size_text(done)} of {size_text(total)}")

    def choose(self, record: SnapshotRecord) -> None:
        """Do nothing: a folder of an object store has no revisions that are chosen."""

    def reason(self, error: Exception, record: SnapshotRecord) -> str:
        return " ".join(str(error).split()) or type(error).__name__


def located(url: str) -> Path:
    """Find the local directory of the model in the object-store folder `url`; metadata are downloaded if needed.

    The result is the directory of the downloaded model or, if the model is not downloaded, a metadata-only snapshot,
    which has the model's files without the contents of the weights. If the store does not answer, the version that was
    last located is used, provided that it is complete on this machine. Raises InvalidModel if the URL is invalid or the
    model cannot be read.
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
    commit = version_of(files)
    place = _place(url, commit)
    small = sorted(files.keys() & {*SMALL_FILES})
    for _ in downloaded(objects, place, {name: files[name] for name in small}):
        pass
    sizes = {name: files[name].num_bytes for name in weight_files(place, files) if name in files}
    with suppress(OSError):  # the cache cannot be written to
        write_file(_latest(url), json.dumps({"commit": commit, "sizes": sizes}))
    if sizes and is_complete(place, sizes):
        return place
    hashes = {name: stated for name in sizes if (stated := files[name].sha256) is not None}
    record = SnapshotRecord(url, commit, commit, tuple(small), sizes, hashes)

    def read(name: str, begin: int, end: int) -> bytes:
        return objects.read(files[name].path, start=begin, stop=end)

    return make_snapshot(record, place, pickles(files), read)


def _listed(url: str) -> tuple[ObjectStore, dict[str, ObjectFile]]:
    """Object store that has the model at `url`, and a mapping from names to the model's files.

    Files in subfolders are left out.
    """
    if (artifact := blob_at(url)) is not None:
        store, digest = artifact
        return _manifest(ObjectStore(store), digest)
    objects = ObjectStore(url)
    listed = {name: info for name, info in objects.list().items() if "/" not in name}
    sums = _sums(objects.read(SUMS).decode(errors="replace")) if SUMS in listed else {}
    return objects, {name: ObjectFile(name, info.num_bytes, info.tag, sums.get(name)) for name, info in listed.items()}


def _manifest(objects: ObjectStore, digest: str) -> tuple[ObjectStore, dict[str, ObjectFile]]:
    """Read the list of an artifact's files from its manifest, the stored object whose sha256 is `digest`.

    An artifact is a set of files that the service stores by content in the object store `objects`. The result is the
    store, and the files, keyed by name; files in subfolders are left out. Raises InvalidModel if the stored manifest
    has another sha256.
    """
    content = objects.read(blob_path(digest))
    if hashlib.sha256(content).hexdigest() != digest:
        raise InvalidModel((f"{objects.url}/{blob_path(digest)}: its content has changed since it was stored",))
    manifest = {name: entry for name, entry in json.loads(content).items() if "/" not in name}
    return objects, {
        name: ObjectFile(blob_path(entry["digest"]), entry["bytes"], entry["digest"], entry["digest"])
        for name, entry in manifest.items()
    }


def _last_located(url: str) -> Path | None:
    """Local directory of the version of the model at `url` that this machine has found last at that address.

    Returns None if this machine has found no version, or if a file of that version is not on this machine.
    """
    try:
        known = json.loads(_latest(url).read_bytes())
        place = _place(url, known["commit"])
        return place if known["sizes"] and is_complete(place, known["sizes"]) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _sums(text: str) -> dict[str, str]:
    """Parse `text`, the output of the program sha256sum, to the sha256 (hex) of each file, keyed by name.

    Other lines are ignored.
    """
    return {found[2]: found[1] for line in text.splitlines() if (found := _SUM.fullmatch(line.strip()))}


def _models_dir() -> Path:
    return cache_dir().resolve() / "models"


def _place(url: str, commit: str) -> Path:
    """Directory on this machine for the files of one commit of the model at `url`."""
    return _models_dir() / f"{url}@{commit}"


def _latest(url: str) -> Path:
    return _models_dir() / f"{url}.latest"
