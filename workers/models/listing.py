"""Search for models in the directories that a study may read, so that users can choose among them.

The search is limited in depth, number of entries and time, and follows no links to directories. Therefore a model to
which a link leads is listed only if its own directory is also searched.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.file_access import FileAccess
from workers.models.adapters import ADAPTER_CONFIG
from workers.models.remote import commit_of, id_of

__all__ = ["FoundModel", "FoundModels", "find_models"]

MAX_DEPTH = 8  # a model in the hub's cache is in models--OWNER--NAME/snapshots/COMMIT
MAX_ENTRIES = 200_000
MAX_SECONDS = 5.0
MAX_CONFIG_BYTES = 2**20
CONFIG = "config.json"


@dataclass(frozen=True)
class FoundModel:
    """A model in a directory: a checkpoint, or a LoRA adapter.

    - `name`: the name of the model in a study file: ID@COMMIT for a model in the hub's cache, else the directory
    - `architecture`: the class of the model, or its type if no class is stated; None for an adapter
    - `num_bytes`: the size of the model's safetensors files
    - `base`: the base model that an adapter states; None for a checkpoint, and for an adapter that states no base model
    """

    directory: str
    name: str
    architecture: str | None
    num_bytes: int
    is_adapter: bool
    base: str | None


@dataclass(frozen=True)
class FoundModels:
    """Result of a search for models: the models, sorted by directory, and whether the search was complete.

    `is_complete` is False if a limit ended the search early. `directories` are the directories that were searched with
    everything below them.
    """

    models: tuple[FoundModel, ...]
    is_complete: bool
    directories: tuple[str, ...]


def find_models(
    access: FileAccess | None,
    *,
    under: str | None = None,
    text: str | None = None,
    limit: int,
    max_entries: int = MAX_ENTRIES,
    max_seconds: float = MAX_SECONDS,
) -> FoundModels:
    """Find models with weights in safetensors files below the directories of `access`.

    Args:
        access: The directories that may be read. None allows all directories.
        under: An absolute directory to search. If it is None, the directories of `access` are searched; if `access` is
            None too, nothing is found.
        text: Text that the name, directory or architecture must have; case is ignored. None accepts every model.
        limit: Maximum number of models.
        max_entries: Number of files and directories after which the search ends.
        max_seconds: Number of seconds after which the search ends.

    Raises:
        PermissionError: `under` may not be read.
        NotADirectoryError: `under` is no directory, is a relative path, or has a NUL character.
    """
    deadline = time.monotonic() + max_seconds
    roots = _roots(access, under)
    waiting = deque((root, 0) for root in roots)
    seen: set[str] = set()
    found: list[FoundModel] = []
    num_entries = 0
    is_complete = True
    while waiting:
        directory, depth = waiting.popleft()
        if directory in seen or not _may_read(access, directory):
            continue
        seen.add(directory)
        entries = _entries(directory)
        num_entries += len(entries)
        if num_entries > max_entries or time.monotonic() > deadline:
            is_complete = False
            break
        names = {entry.name for entry in entries}
        model = _model(access, directory, names) if names & {CONFIG, ADAPTER_CONFIG} else None
        if model is not None and _has(model, text):
            if len(found) == limit:
                is_complete = False
                break
            found.append(model)
        inner = sorted(entry.path for entry in entries if _is_directory(entry))
        if depth < MAX_DEPTH:
            waiting.extend((path, depth + 1) for path in inner)
        elif inner:
            is_complete = False
    return FoundModels(tuple(sorted(found, key=lambda model: model.directory)), is_complete, roots)


def _roots(access: FileAccess | None, under: str | None) -> tuple[str, ...]:
    if under is None:
        allowed = () if access is None else (*access.readable, *access.trusted)
        roots = sorted({os.path.realpath(place) for place in allowed if _may_read(access, place)})
        return tuple(root for root in roots if os.path.isdir(root))
    if not os.path.isabs(under):
        raise NotADirectoryError(f"{under}: is relative; give an absolute directory")
    if "\0" in under:
        raise NotADirectoryError(f"{under!r}: has a NUL character, which no directory has; give an absolute directory")
    if access is not None and (reason := access.refusal(under)) is not None:
        raise PermissionError(reason)
    root = os.path.realpath(under)
    if not os.path.isdir(root):
        raise NotADirectoryError(f"{under}: is no directory")
    return (root,)


def _may_read(access: FileAccess | None, path: str) -> bool:
    return access is None or access.refusal(path) is None


def _entries(directory: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except OSError:  # it may have been removed, or the server may not read it
        return []


def _is_directory(entry: os.DirEntry[str]) -> bool:
    try:
        return not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def _model(access: FileAccess | None, directory: str, names: set[str]) -> FoundModel | None:
    """Describe the model in a directory that has files with the names `names`; None if it has no model."""
    is_adapter = ADAPTER_CONFIG in names and CONFIG not in names
    config = _document(access, os.path.join(directory, ADAPTER_CONFIG if is_adapter else CONFIG))
    num_bytes = sum(_sizes(access, directory, names))
    if config is None or num_bytes == 0:
        return None
    architectures, kind = config.get("architectures"), config.get("model_type")
    stated = architectures[0] if isinstance(architectures, list) and architectures else kind
    base = config.get("base_model_name_or_path")
    place = Path(directory)
    hub_id = id_of(place)
    return FoundModel(
        directory=directory,
        name=directory if hub_id is None else f"{hub_id}@{commit_of(place)}",
        architecture=stated if isinstance(stated, str) and not is_adapter else None,
        num_bytes=num_bytes,
        is_adapter=is_adapter,
        base=base if is_adapter and isinstance(base, str) else None,
    )


def _document(access: FileAccess | None, file: str) -> dict[str, Any] | None:
    """Read a JSON object from a file; None if `access` does not allow reading it, or if it has no JSON object."""
    if not _may_read(access, file) or not os.path.isfile(file):
        return None
    try:
        with open(file, "rb") as stream:
            content = stream.read(MAX_CONFIG_BYTES + 1)
        document = json.loads(content) if len(content) <= MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _sizes(access: FileAccess | None, directory: str, names: set[str]) -> Iterator[int]:
    for name in names:
        file = os.path.join(directory, name)
        if name.endswith(".safetensors") and _may_read(access, file) and os.path.isfile(file):
            yield os.path.getsize(file)


def _has(model: FoundModel, text: str | None) -> bool:
    shown = f"{model.directory}\n{model.name}\n{model.architecture or ''}"
    return text is None or text.casefold() in shown.casefold()
