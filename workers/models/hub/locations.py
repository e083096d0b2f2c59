"""The directory of a model: its own, that of a hub model in the hub's cache, or of a metadata-only snapshot.

A hub model whose weights are not all in the cache is checked as a metadata-only snapshot, so that whether a family can
be merged is known before its weights are downloaded. A snapshot is of one commit, and so is the download that replaces
it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection
from pathlib import Path

from workers.errors import InvalidModel
from workers.models.headers import PICKLES
from workers.models.hub.downloads import COMMIT, download, has_size, point_to
from workers.models.hub.errors import HubUnusable, reason_of
from workers.models.hub.metadata import TIMEOUT_S, SnapshotRecord, is_metadata_only, make_snapshot, read_record
from workers.models.tokenizers import TOKENIZER_FILES

__all__ = ["HUB_ID", "commit_of", "id_of", "locate"]

# What the names of the files of whole models and of adapters begin with.
STEMS = ("model", "adapter_model")

INDEX = "{}.safetensors.index.json"

# What is downloaded of a model besides its weights: no pickles and no code.
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    *(INDEX.format(stem) for stem in STEMS),
    *TOKENIZER_FILES,
)

# The needed files, and the model card, which states the licence.
SMALL_FILES = (*NEEDED_FILES, "README.md")

DIRECTORY = "a directory with config.json, tokenizer files and *.safetensors"

# `name` or `owner/name`, with an optional branch, tag or commit.
HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w.-]*))?")

# The hub states a sha256 for all files of more than 10 MB. Weights without one can only be smaller; they are downloaded
# together with the small files.
MAX_PLAIN_BYTES = 10 * 2**20


def locate(model: str | Path) -> Path:
    """Find the directory of a model that is given as a directory or a hub id.

    For a hub model it is a directory in the hub's cache, or a metadata-only snapshot, which has the model's files
    without the contents of the weights. No weights are downloaded. A complete model in the cache is used without asking
    the hub if a commit is given, and if the hub cannot be reached (or HF_HUB_OFFLINE is set). Raises InvalidModel.
    """
    path = Path(model)
    if path.is_dir():
        return path
    if path.exists():
        raise InvalidModel((f"{path}: is a file; expected {DIRECTORY}",))
    parts = HUB_ID.fullmatch(str(model))
    if parts is None:
        raise InvalidModel((f"{path}: does not exist; expected {DIRECTORY}",))
    name, revision = parts[1], parts[2] or "main"
    cached = _cached(name, revision)
    if cached and COMMIT.fullmatch(revision):
        return cached
    try:
        return _looked_up(name, revision)
    except Exception as error:  # raised by the hub's client, by its HTTP library, or by the system
        if cached:
            return cached
        reason = reason_of(error, name, revision)
        raise InvalidModel(
            (
                f"{model}: neither a directory nor a hub model that can be loaded here: {reason}; expected "
                f"{DIRECTORY}, or the id of a hub model that is in the hub's cache or can be downloaded",
            )
        ) from error


def commit_of(directory: Path) -> str | None:
    """The commit of the hub model in a directory that `locate` returned; None for other directories."""
    if is_metadata_only(directory):
        return read_record(directory).commit
    return directory.name if directory.parent.name == "snapshots" and COMMIT.fullmatch(directory.name) else None


def id_of(directory: Path) -> str | None:
    """The hub id (owner/name) of the model in a directory that `locate` returned; None for other directories."""
    if is_metadata_only(directory):
        return read_record(directory).name
    owner, _, name = directory.parent.parent.name.removeprefix("models--").rpartition("--")
    return (f"{owner}/{name}" if owner else name) if commit_of(directory) else None


def _cached(name: str, revision: str) -> Path | None:
    """The directory of a hub model in the cache, or None if not all of its files are there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        found = snapshot_download(name, revision=revision, local_files_only=True, allow_patterns=[*NEEDED_FILES])
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
    directory = Path(found)
    weights = _weights(directory, os.listdir(directory))
    return directory if weights and all((directory / file).is_file() for file in weights) else None


def _looked_up(name: str, revision: str) -> Path:
    """Ask the hub for a model's present commit, and return a directory for it.

    It is the commit's directory in the cache if all files are there, else a metadata-only snapshot, which has the files
    without the contents of the weights.
    """
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    if not COMMIT.fullmatch(info.sha or ""):
        raise HubUnusable(f"the hub states the commit {info.sha!r:.80}; expected 40 hex digits")
    files = {file.rfilename: file for file in info.siblings or () if "/" not in file.rfilename}
    small = sorted(files.keys() & {*SMALL_FILES})
    snapshot = download(name, info.sha, small)
    weights = [file for file in _weights(snapshot, files) if file in files]
    sizes: dict[str, int] = {file: files[file].size for file in weights}
    if None in sizes.values():
        raise HubUnusable("the hub does not say how large its files are")
    plain = [file for file, size in sizes.items() if files[file].lfs is None and size <= MAX_PLAIN_BYTES]
    download(name, info.sha, plain)
    sizes = {file: size for file, size in sizes.items() if file not in plain}
    if weights and all(has_size(snapshot / file, size) for file, size in sizes.items()):
        point_to(snapshot, revision)
        return snapshot
    hashes = {file: stated.sha256 for file in sizes if (stated := files[file].lfs)}
    record = SnapshotRecord(name, revision, info.sha, (*small, *plain), sizes, hashes)
    pickles = [file for file in files if any(Path(file).match(pattern) for pattern in PICKLES)]
    return make_snapshot(record, snapshot, pickles)


def _weights(directory: Path, names: Collection[str]) -> list[str]:
    """The names, among `names`, of the safetensors files with the weights of a model.

    `directory` has the model's small files. A second copy of the weights in another format is not included. The result
    is empty if an index cannot be read.
    """
    for stem in STEMS:
        if (single := f"{stem}.safetensors") in names:
            return [single]
        if (index := INDEX.format(stem)) in names:
            try:
                files = json.loads((directory / index).read_bytes())["weight_map"].values()
                return sorted({file for file in files if Path(file).name == file and file.endswith(".safetensors")})
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return []  # `headers` reports why
    return []
