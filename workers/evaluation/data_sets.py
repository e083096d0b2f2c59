"""Loading of the data of tasks: from the user's directory, the hub or a mirror, or earlier downloads.

A task names its data as `owner/name`. The data are searched, in this order, in

1. the directory `$MERGESEARCH_DATA/owner/name`, with data files or the result of `hf download --local-dir`;
2. the hub, or the mirror in `HF_ENDPOINT`, if it answers; else the cache of the package `datasets`;
3. the hub client's cache, where `hf download --repo-type dataset owner/name` puts a snapshot.

Data with a name that begins with `TRACE/` are not on the hub; they are found only in the directory of point 1.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from workers.errors import InvalidTask
from workers.models.remote import hub_cache, without_waiting

__all__ = ["DATA_VARIABLE", "data_dir", "is_on_hub", "load", "local_copy", "place_of", "snapshot_of"]

DATA_VARIABLE = "MERGESEARCH_DATA"

# Files of a snapshot that are no data.
NO_DATA = ("README.md", ".gitattributes")

# The sources of data sets that are not on the hub, by the first part of the data set's name.
ELSEWHERE = {"TRACE": "the archive that the README of https://github.com/BeyonderXX/TRACE names"}


def data_dir() -> Path | None:
    """The directory of the user's own copies of data sets; None if no directory is configured."""
    given = os.environ.get(DATA_VARIABLE)
    return Path(given).expanduser().absolute() if given else None


def local_copy(path: str) -> Path | None:
    """The user's own copy of the data set `path` (owner/name), as a directory; None if there is none.

    It is the subdirectory `path` of the directory that the function `data_dir` returns.
    """
    root = data_dir()
    if root is None or os.path.isabs(path) or ".." in Path(path).parts:
        return None
    return root / path if (root / path).is_dir() else None


def snapshot_of(path: str) -> Path | None:
    """Newest snapshot with data files of the data set `path` (owner/name) in the hub client's cache, or None."""
    if not is_on_hub(path):
        return None
    folder = hub_cache() / f"datasets--{path.replace('/', '--')}"
    places = sorted((folder / "snapshots").glob("*"), key=lambda place: place.stat().st_mtime, reverse=True)
    with suppress(OSError):
        places.insert(0, folder / "snapshots" / (folder / "refs" / "main").read_text().strip())
    return next((place for place in places if _has_data(place)), None)


def is_on_hub(path: str) -> bool:
    """Whether `path` can be the name of a data set on the hub, `name` or `owner/name`, rather than a file path."""
    return not os.path.isabs(path) and path.count("/") <= 1 and not path.startswith(".")


def place_of(path: str) -> Path | None:
    """Local directory with files of the data set `path` (owner/name), complete or not; None if there is none.

    The data are not loaded, and the network is not used.
    """
    return local_copy(path) or _prepared(path) or snapshot_of(path)


def load(load_dataset: Callable[..., Any], path: str, name: str | None, options: Mapping[str, Any]) -> Any:
    """Load a data set with `load_dataset` from the first of several places that has the data.

    The places are the user's own copies, the hub or its mirror, the cache of the package `datasets`, and the hub
    client's cache, in this order. `path`, `name` and `options` are arguments of `load_dataset`. Raises InvalidTask if
    no place has the data; the message says why, and how to get them. Raises the error of `load_dataset` if a place has
    the data but they cannot be read.
    """
    from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

    if path in _PACKAGED_DATASETS_MODULES:
        return load_dataset(path=path, name=name, **options)
    if (copy := local_copy(path)) is not None:
        try:
            return load_dataset(path=str(copy), name=name, **options)
        except FileNotFoundError as error:  # the message goes on with a list of 60 file name extensions
            missing = str(error).partition(" with any supported extension")[0]
            raise InvalidTask(f"its data in {copy} are not complete: {missing}") from error
    is_local = os.path.isdir(path)
    try:
        with nullcontext() if is_local or not is_on_hub(path) else without_waiting():
            return load_dataset(path=path, name=name, **options)
    except Exception as error:  # raised by the hub's client, by its HTTP library, or for a cache without these data
        if is_local or isinstance(error, InvalidTask):
            raise
        if (snapshot := snapshot_of(path)) is not None:
            return load_dataset(path=str(snapshot), name=name, **options)
        if not _is_absence(error):
            raise
        raise InvalidTask(_lack(path, f"{type(error).__name__}: {error}".splitlines()[0])) from error


def _is_absence(error: Exception) -> bool:
    is_offline = isinstance(error, ConnectionError) or "offline" in str(error).lower()
    return is_offline or isinstance(error, FileNotFoundError) or "couldn't find cache" in str(error).lower()


def _lack(path: str, reason: str) -> str:
    root = data_dir()
    own = f"{root / path} does not exist" if root else f"{DATA_VARIABLE} names no directory with own copies"
    if not is_on_hub(path):
        source = ELSEWHERE.get(path.split("/")[0], "its authors")
        return (
            f"its data {path} are not here ({own}); they are not on the hub: unpack {source} so that the files are in "
            f"${DATA_VARIABLE}/{path}"
        )
    return (
        f"its data cannot be fetched ({reason}); also looked for in: {own}; no snapshot of {path} in {hub_cache()}. "
        f"Where there is no network, run `mergesearch tasks fetch` or `hf download --repo-type dataset {path}` on a "
        "machine that has one and copy the cache, or use an lm-eval YAML file or an inline JSONL task over local files"
    )


def _has_data(place: Path) -> bool:
    return any(file.is_file() and file.name not in NO_DATA for file in place.rglob("*"))


def _prepared(path: str) -> Path | None:
    """Cache directory of the package `datasets` for the data set `path` (owner/name); None if it is not cached."""
    from datasets import config
    from datasets.naming import camelcase_to_snakecase

    *owner, name = path.split("/")
    root = os.path.join(str(config.HF_DATASETS_CACHE), "___".join([*owner, camelcase_to_snakecase(name)]))
    found = [place for place in glob.glob(os.path.join(glob.escape(root), "*", "*", "*")) if os.path.isdir(place)]
    return Path(root) if found else None
