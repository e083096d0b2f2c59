"""Files that a task of an lm-eval YAML file is made from, and their common digest.

The digest is computed without building the task. lm-eval's own functions parse the YAML files, and functions of the
package `datasets` find the data files, under the limits of the module `task_loading`.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from workers.errors import InvalidTask
from workers.evaluation.task_index import IndexNeeded, is_shipped, task_index
from workers.evaluation.task_loading import guarded_loading, is_address
from workers.file_access import FileAccess
from workers.models.fingerprints import file_hash
from workers.types import digest_of

__all__ = ["files_digest"]

# From this size in bytes, the hash of a file is cached, because several processes of a machine build the same task.
LARGE_BYTES = 8 << 20


def files_digest(file: Path, access: FileAccess | None) -> str:
    """The sha256 (hex) of the names and contents of the files that the task of the YAML file `file` is made from.

    These are:

    - the YAML file, the YAML files that it includes, and, for a group, those of the group's tasks in its folder
    - the local data files that these YAML files name (`data_files`, `data_dir` and `dataset_path`)
    - if a YAML file names a Python function, all Python files in its folder and the folders below

    Other files that `access` refuses are neither read nor counted; building the task reports them if it needs them. The
    files of shipped tasks, which change with the installed version only, are not counted either. Relative names are
    relative to the folder of `file`, so that a copy of the folder has the same digest. Raises InvalidTask if a file
    cannot be read.
    """
    try:
        found = _hashes(file, access)
    except IndexNeeded:
        task_index()
        found = _hashes(file, access)
    return digest_of(found)


def _hashes(file: Path, access: FileAccess | None) -> dict[str, str]:
    with guarded_loading(file.parent, access):
        files = _TaskFiles(file.parent.resolve(), access)
        files.add_task(file.name)
        return files.hashes


class _TaskFiles:
    """Collection of a task's files; the attribute `hashes` has the sha256 (hex) of each file, keyed by its name.

    `folder` is the folder of the task's YAML file. `access` limits the files that may be read; None means no limit. The
    methods must be called in the context manager `guarded_loading`.
    """

    def __init__(self, folder: Path, access: FileAccess | None) -> None:
        self.hashes: dict[str, str] = {}
        self._folder = folder
        self._access = access
        self._configs: dict[Path, dict[str, Any]] = {}

    def add_task(self, name: str) -> None:
        """Add the files of the task or group in the YAML file `name` of the folder."""
        from lm_eval.tasks._index import TaskIndex

        index: Mapping[str, Any] | None = None
        waiting, known = [self._folder / name], {self._folder / name}
        while waiting:
            config = self._config(waiting.pop())
            names = []
            for part in _parts(config):
                self._add_data(part)
                names += _names(part)
            if names and index is None:
                index = TaskIndex.build([self._folder])
            new = {file for each in names for file in _files_of(each, index or {}) if not is_shipped(file.parent)}
            waiting += sorted(new - known)
            known |= new

    def _config(self, file: Path, *, is_absolute: bool = False) -> dict[str, Any]:
        """Add a YAML file, the files that it includes, and Python files; return its settings, with those it includes.

        `is_absolute` says whether the file was named by an absolute path. The result is empty if the file may not be
        read, or is none that lm-eval can read.
        """
        from lm_eval.tasks import _yaml_loader

        place = file.resolve()
        if place in self._configs:
            return self._configs[place]
        self._configs[place] = {}  # for a file that includes itself, which lm-eval refuses
        if self._is_refused(file) or not self._add(file, is_absolute=is_absolute):
            return {}
        functions: list[str] = []
        try:
            loader = _yaml_loader._make_loader(place.parent, resolve_funcs=False)
            yaml.add_constructor("!function", lambda _, node: functions.append(str(node.value)), Loader=loader)
            config = yaml.load(place.read_bytes(), Loader=loader)
        except Exception:  # a file of any content, which building the task reports
            return {}
        if not isinstance(config, dict):
            return {}
        if functions and not is_shipped(place.parent):
            self._add_python(place.parent, is_absolute=is_absolute)
        included = config.pop("include", [])
        merged: dict[str, Any] = {}
        for name in included if isinstance(included, list) else [included]:
            inner = Path(place.parent, str(name))  # a file without suffix may be the name of a shipped task
            if inner.is_file() and not is_shipped(inner.resolve().parent):
                merged |= self._config(inner, is_absolute=is_absolute or os.path.isabs(str(name)))
        self._configs[place] = merged | config
        return self._configs[place]

    def _add_python(self, directory: Path, *, is_absolute: bool) -> None:
        for place, folders, names in os.walk(directory):
            folders[:] = [folder for folder in folders if not folder.startswith(".")]
            for file in (Path(place, name) for name in names if name.endswith(".py") and not name.startswith(".")):
                if not self._is_refused(file):
                    self._add(file, is_absolute=is_absolute)

    def _add_data(self, config: Mapping[str, Any]) -> None:
        """Add the local data files of a task with the settings `config`."""
        import datasets.data_files
        from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

        options, path = config.get("dataset_kwargs"), config.get("dataset_path")
        options = options if isinstance(options, Mapping) else {}
        patterns, inner = options.get("data_files"), str(options.get("data_dir") or "")
        is_directory = is_on_hub = False
        root = ""
        if isinstance(path, str) and path and path not in _PACKAGED_DATASETS_MODULES:
            is_directory = Path(self._folder, path).is_dir()
            is_on_hub = not is_directory
            root = path if is_directory else ""
        place = Path(self._folder, root, Path(inner).expanduser()).resolve()
        is_absolute = os.path.isabs(inner) or os.path.isabs(root)
        try:
            if patterns:
                by_split = datasets.data_files.sanitize_patterns(patterns)
            elif is_directory or (inner and not is_on_hub):
                by_split = datasets.data_files.get_data_patterns(str(place))
                if not self._is_refused(readme := place / "README.md"):  # may say how the files are read
                    self._add(readme, is_absolute=is_absolute)
            else:
                return
        except (FileNotFoundError, InvalidTask, TypeError, ValueError):  # building the task reports it
            return
        for pattern in {str(pattern) for of_split in by_split.values() for pattern in of_split}:
            if is_address(pattern) or (is_on_hub and not os.path.isabs(pattern)):
                continue
            try:
                found = datasets.data_files.resolve_pattern(pattern, str(place))
            except (FileNotFoundError, InvalidTask, ValueError):  # building the task reports it
                continue
            for name in found:
                self._add(Path(name), is_absolute=is_absolute or os.path.isabs(pattern))

    def _is_refused(self, file: Path) -> bool:
        return self._access is not None and self._access.refusal(file) is not None

    def _add(self, file: Path, *, is_absolute: bool) -> bool:
        """Add a file that may be read; return whether it is there and this user may read it."""
        name = str(file) if is_absolute else os.path.relpath(file, self._folder)
        if name not in self.hashes and file.is_file():
            try:
                self.hashes[name] = _hash(file)
            except (FileNotFoundError, PermissionError):
                return False
            except OSError as error:
                raise InvalidTask(f"{file}: cannot be read ({error.strerror})") from error
        return name in self.hashes


def _hash(file: Path) -> str:
    if file.stat().st_size >= LARGE_BYTES:
        return file_hash(file)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the settings of a task or group, and the settings that a group has for each of its members."""
    waiting: list[Any] = [config]
    known: set[int] = set()  # YAML can refer to an object from several places, also from within the object
    while waiting:
        part = waiting.pop()
        if isinstance(part, Mapping) and id(part) not in known:
            known.add(id(part))
            yield part
            waiting += _members(part)


def _members(config: Mapping[str, Any]) -> list[Any]:
    members = config.get("task")
    return members if isinstance(members, list) else []


def _names(config: Mapping[str, Any]) -> list[str]:
    """The names of tasks and groups to which the settings of a group refer; empty for a task.

    The group's own name is one of them, because lm-eval looks a group up by its name.
    """
    members = [each.get("task") if isinstance(each, Mapping) else each for each in _members(config)]
    return [name for name in (config.get("group"), *members) if isinstance(name, str)]


def _files_of(name: str, index: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the YAML files of the task, group or tag `name` in lm-eval's `index` of a folder."""
    entry = index.get(name)
    if entry is None:
        return
    members = [entry] if entry.yaml_path is not None else filter(None, map(index.get, sorted(entry.tags)))
    yield from (member.yaml_path for member in members if member.yaml_path is not None)
