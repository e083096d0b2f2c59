"""Models on the Hugging Face hub: found in its cache, looked at without their weights, downloaded.

A model that is not wholly in the cache is looked at as a stand-in: a directory with its small files and, for each file
of weights, one that begins with the real file's header, has its size, and is a hole behind that. Whatever reads
configurations and headers works on it as on the model, so that whether a family can be merged is known before its
weights are fetched. A stand-in is of one commit, and so is the download that replaces it. What the files mean is not
known here.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import escape
from pathlib import Path
from typing import Any

from workers.cache import cache_dir
from workers.errors import InvalidModel
from workers.models.headers import MAX_HEADER_BYTES, PICKLES

__all__ = [
    "HUB_ID",
    "TOKENIZER_FILES",
    "absent_bytes",
    "commit_of",
    "fetched",
    "id_of",
    "is_metadata_only",
    "lack_of_space",
    "locate",
    "named",
    "stated_hash",
]

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)

# Of whole models, and of adapters.
STEMS = ("model", "adapter_model")

INDEX = "{}.safetensors.index.json"

# What a model needs beside its weights: never pickles, never code.
NEEDED_FILES = (
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    *(INDEX.format(stem) for stem in STEMS),
    *TOKENIZER_FILES,
)

# With its model card, which states the licence.
SMALL_FILES = (*NEEDED_FILES, "README.md")

# Beside the files, what a stand-in stands for.
RECORD = "hub.json"

DIRECTORY = "a directory with config.json, tokenizer files and *.safetensors"

# `name` or `owner/name`, and perhaps the branch, tag or commit.
HUB_ID = re.compile(r"(\w[\w.-]*(?:/\w[\w.-]*)?)(?:@(\w[\w.-]*))?")

COMMIT = re.compile("[0-9a-f]{40}")

# The hub stores files of more than 10 MB by their sha256, and usually smaller weights too.
MAX_PLAIN_BYTES = 10 * 2**20

# Most headers are no longer; the rest of one that is takes a second request.
FIRST_BYTES = 2**16

# How long a silent hub is waited for, and how many headers are asked for at once.
TIMEOUT_S = 10.0
CONNECTIONS = 8

# Between two notes on a download.
INTERVAL_S = 10.0

# Free disk space that a download leaves.
MARGIN_BYTES = 2**30


@dataclass(frozen=True)
class _Record:
    """What a stand-in stands for: the files of a model, and of its weights sizes and sha256 (hex) as the hub says."""

    name: str
    revision: str
    commit: str
    small_files: tuple[str, ...]
    sizes: Mapping[str, int]
    hashes: Mapping[str, str]


# Finding


def locate(model: str | Path) -> Path:
    """The directory of `model`: itself; of a hub model where the hub's cache has it, else a stand-in for it.

    No weights are fetched. Where the hub cannot be reached (or HF_HUB_OFFLINE is set), a model that is wholly in the
    cache is the one meant; one whose commit is given is then not asked about. Raises InvalidModel.
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
    except Exception as error:  # of the hub's client, of its HTTP library, and of the system
        if cached:
            return cached
        raise InvalidModel(
            (
                f"{model}: neither a directory nor a hub model that can be had here: {_reason(error, name, revision)}; "
                f"expected {DIRECTORY}, or the id of a hub model that is in the hub's cache or can be fetched",
            )
        ) from error


def commit_of(directory: Path) -> str | None:
    """The commit of the hub model that is at `directory`, as `locate` gives it; None of any other directory."""
    if is_metadata_only(directory):
        return _record(directory).commit
    return directory.name if directory.parent.name == "snapshots" and COMMIT.fullmatch(directory.name) else None


def id_of(directory: Path) -> str | None:
    """owner/name of the hub model that is at `directory`, as `locate` gives it; None of any other directory."""
    if is_metadata_only(directory):
        return _record(directory).name
    owner, _, name = directory.parent.parent.name.removeprefix("models--").rpartition("--")
    return (f"{owner}/{name}" if owner else name) if commit_of(directory) else None


def _cached(name: str, revision: str) -> Path | None:
    """Where the cache has the model wholly, as far as its own files tell."""
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
    """The model as the hub has it now: where it is in the cache, or a stand-in."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(name, revision=revision, files_metadata=True, timeout=TIMEOUT_S)
    if not COMMIT.fullmatch(info.sha or ""):
        raise _Unusable(f"the hub says that it has the commit {info.sha!r:.80}")
    files = {file.rfilename: file for file in info.siblings or () if "/" not in file.rfilename}
    small = sorted(files.keys() & {*SMALL_FILES})
    snapshot = _download(name, info.sha, small)
    weights = [file for file in _weights(snapshot, files) if file in files]
    sizes: dict[str, int] = {file: files[file].size for file in weights}
    if None in sizes.values():
        raise _Unusable("the hub does not say how large its files are")
    plain = [file for file, size in sizes.items() if files[file].lfs is None and size <= MAX_PLAIN_BYTES]
    _download(name, info.sha, plain)
    sizes = {file: size for file, size in sizes.items() if file not in plain}
    if weights and all(_has_size(snapshot / file, size) for file, size in sizes.items()):
        _point(snapshot, revision)
        return snapshot
    hashes = {file: stated.sha256 for file in sizes if (stated := files[file].lfs)}
    record = _Record(name, revision, info.sha, (*small, *plain), sizes, hashes)
    pickles = [file for file in files if any(Path(file).match(pattern) for pattern in PICKLES)]
    return _stand_in(record, snapshot, pickles)


def _weights(directory: Path, names: Collection[str]) -> list[str]:
    """The safetensors files of the model whose small files are in `directory`, of all `names` beside them: not those
    of a second copy in another format. None where it has no readable index."""
    for stem in STEMS:
        if (single := f"{stem}.safetensors") in names:
            return [single]
        if (index := INDEX.format(stem)) in names:
            try:
                files = json.loads((directory / index).read_bytes())["weight_map"].values()
                return sorted({file for file in files if Path(file).name == file and file.endswith(".safetensors")})
            except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
                return []  # the reader of headers says why
    return []


def _has_size(file: Path, size: int | None) -> bool:
    return file.is_file() and file.stat().st_size == size


# Stand-ins


def is_metadata_only(directory: Path) -> bool:
    """The directory only tells of a hub model's weights; `fetched` gives one that holds them."""
    return directory.is_relative_to(_root()) and (directory / RECORD).is_file()


def stated_hash(file: Path) -> str | None:
    """The sha256 (hex) that the hub states of a stand-in's weights; None of a file that is here.

    Raises InvalidModel if it states none."""
    if not is_metadata_only(file.parent):
        return None
    record = _record(file.parent)
    if file.name in record.sizes and file.name not in record.hashes:
        raise InvalidModel(
            (f"{named(str(file))}: the hub does not state its sha256; fetch it with `hf download {record.name}`",)
        )
    return record.hashes.get(file.name)


def named(text: str) -> str:
    """The text with stand-ins called as the model and commit they stand for: owner/name@commit."""
    return text.replace(f"{_root()}{os.sep}", "")


def _root() -> Path:
    return cache_dir().resolve() / "hub"


def _record(directory: Path) -> _Record:
    return _Record(**json.loads((directory / RECORD).read_bytes()))


def _stand_in(record: _Record, snapshot: Path, pickles: Iterable[str]) -> Path:
    """The stand-in of `record`, made if there is none: it never changes, as the commit does not."""
    place = _root() / f"{record.name}@{record.commit}"
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
        with suppress(OSError):  # where another process was faster
            made.rename(place)
    if not is_metadata_only(place):
        raise OSError(f"{place}: cannot be written")
    return place


def _header(record: _Record, file: str) -> bytes:
    """The safetensors header with its length; where the file cannot have one, what it begins with."""
    size = record.sizes[file]
    start = _range(record, file, 0, min(size, FIRST_BYTES))
    end = 8 + int.from_bytes(start[:8], "little")
    if end > size or end > 8 + MAX_HEADER_BYTES:
        return start[:8]
    return start[:end] + _range(record, file, len(start), end)


def _range(record: _Record, file: str, begin: int, end: int) -> bytes:
    """Bytes of one file of the hub's, never more than are asked for."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

    if begin >= end:
        return b""
    headers = {**build_hf_headers(), "range": f"bytes={begin}-{end - 1}", "accept-encoding": "identity"}
    url = hf_hub_url(record.name, file, revision=record.commit)
    with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            raise _Unusable(
                f"it does not send parts of files (status {response.status_code} for a range of {file}), so weights "
                f"cannot be checked before they are fetched; fetch them with `hf download {record.name}`"
            )
        found = bytearray()
        for part in response.iter_bytes():
            found += part
            if len(found) >= end - begin:
                break
    if len(found) < end - begin:
        raise _Unusable(f"it sent {len(found)} of the bytes {begin} to {end - 1} of {file}")
    return bytes(found[: end - begin])


# Downloading


def absent_bytes(directories: Iterable[Path]) -> int:
    """How much `fetched` would download; each model counts once."""
    return sum(sum(_absent(_record(directory)).values()) for directory in {*directories} if is_metadata_only(directory))


def fetched(directories: Sequence[Path], *, note: Callable[[str], None] = log.info) -> tuple[Path, ...]:
    """Each directory, in place of a stand-in one that holds the model, downloaded at the commit that was looked at.

    Files that are whole are kept if a download breaks off. `note` hears what is downloaded, and how far it is. Raises
    InvalidModel, also if the cache's disk has no room: then nothing was downloaded.
    """
    if lack := lack_of_space(directories):
        raise InvalidModel((lack,))
    records = {directory: _record(directory) for directory in directories if is_metadata_only(directory)}
    found = {directory: _fetch(record, note) for directory, record in records.items()}
    return tuple(found.get(directory, directory) for directory in directories)


def _fetch(record: _Record, note: Callable[[str], None]) -> Path:
    absent = _absent(record)
    total = sum(absent.values())
    if absent:
        note(f"Downloading {record.name}@{record.commit[:12]} from the hub: {_size(total)} ...")
    try:
        snapshot = _download(record.name, record.commit, (*record.small_files, *record.sizes), _notes(note, total))
        if missing := _absent(record):
            raise _Unusable(f"{', '.join(missing)} did not arrive")
    except Exception as error:
        raise InvalidModel(
            (
                f"{record.name}: its weights cannot be fetched: {_reason(error, record.name, record.revision)}; files "
                "that came whole are kept, the same command fetches the others",
            )
        ) from error
    _point(snapshot, record.revision)
    return snapshot


def _absent(record: _Record) -> dict[str, int]:
    """The sizes of the weights that the cache does not have."""
    snapshot = _snapshot(record.name, record.commit)
    return {file: size for file, size in record.sizes.items() if not _has_size(snapshot / file, size)}


def _snapshot(name: str, commit: str) -> Path:
    """Where the cache keeps a commit of a model."""
    return _cache() / f"models--{name.replace('/', '--')}" / "snapshots" / commit


def _cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE).expanduser().resolve()


def lack_of_space(directories: Iterable[Path]) -> str | None:
    """Why the models that are not here cannot be downloaded; None if there is room for them."""
    absent = sorted({directory for directory in directories if is_metadata_only(directory)})
    num_bytes = absent_bytes(absent)
    place = _cache()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    if num_bytes == 0 or num_bytes + MARGIN_BYTES <= free:
        return None
    return (
        f"{', '.join(_record(directory).name for directory in absent)}: {_size(num_bytes)} are to be downloaded to "
        f"{_cache()}, whose disk has {_size(free)} free; make room, or set HF_HUB_CACHE to a directory "
        "on another disk"
    )


def _download(name: str, commit: str, files: Sequence[str], progress: type | None = None) -> Path:
    """The cache's directory of the commit, with these files."""
    from huggingface_hub import snapshot_download

    if files:
        snapshot_download(
            name,
            revision=commit,
            allow_patterns=[escape(file) for file in files],
            tqdm_class=progress or _notes(lambda _: None, 0),
        )
    return _snapshot(name, commit)


def _point(snapshot: Path, revision: str) -> None:
    """Make this the model that the cache has of the branch or tag, once it is whole."""
    reference = snapshot.parents[1] / "refs" / revision
    if COMMIT.fullmatch(revision):
        return
    with suppress(OSError):  # a cache that cannot be written to
        if not reference.is_file() or reference.read_text() != snapshot.name:
            reference.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=reference.parent, delete=False) as temporary:
                temporary.write(snapshot.name)
            os.replace(temporary.name, reference)


def _notes(note: Callable[[str], None], total: int) -> type:
    """The client's bars of progress, as lines for `note`: bars are for terminals alone, and disturb other lines."""
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
                note(f"Downloaded {_size(self.n)} of {_size(total)}")
            return None

    return Notes


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:.1f} MiB"


# What went wrong


class _Unusable(Exception):
    """A hub that answers, but not with what is needed."""


def _reason(error: Exception, name: str, revision: str) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    login = "log in with `hf auth login`, or set HF_TOKEN"
    for cause in _causes(error):
        match cause:
            case GatedRepoError():
                return f"it is gated: ask for access at {constants.ENDPOINT}/{name}, and {login}"
            case RepositoryNotFoundError():
                return f"the hub has none of this name, or not for you; if it is private, {login}"
            case RevisionNotFoundError():
                return f"it has no branch, tag or commit {revision!r}"
            case HfHubHTTPError():
                return f"the hub ({constants.ENDPOINT}) answers {cause.response.status_code}: {_line(cause)}"
            case OfflineModeIsEnabled():
                return "it is not wholly in the hub's cache, and the hub cannot be reached: HF_HUB_OFFLINE is set"
            case _Unusable():
                return str(cause)
    if isinstance(error, OSError) and error.errno and not isinstance(error, ConnectionError):
        return _line(error)
    return (
        f"it is not wholly in the hub's cache, and the hub cannot be reached: {constants.ENDPOINT}: "
        f"{type(error).__name__}: {_line(error)}"
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or found.__context__


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
