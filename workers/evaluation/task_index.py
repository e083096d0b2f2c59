"""Index of the evaluation tasks that have a name: tasks of lm-eval, and tasks shipped with this project.

Building lm-eval's index parses 14,000 YAML files, and takes 10 to 70 s. Therefore the index is cached for each version
of lm-eval. If several processes need the index, one process builds it while the other processes wait.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, TypeAlias

from workers.cache import cache_dir, cached
from workers.directories import turn
from workers.task_pack import pack_dir

__all__ = [
    "IndexNeeded",
    "PlainIndex",
    "index_at_hand",
    "index_if_loaded",
    "index_to_send",
    "is_shipped",
    "manager_of",
    "shipped_dirs",
    "task_index",
    "use_index",
]

# The kind, the YAML file and the tags of each task, group and tag, by name.
PlainIndex: TypeAlias = Mapping[str, tuple[str, str | None, tuple[str, ...]]]

TASKS = "lm_eval/tasks/"

# The longest wait, in seconds, for another process that builds the index.
TURN_S = 300.0

log = logging.getLogger(__name__)

# The index that another process has loaded, for a confined process, which can read no cache.
_given: dict[str, Any] = {}


class IndexNeeded(BaseException):
    """Raised if a task that is being loaded refers to another task by name, and the index of names is not loaded.

    The caller must call the function `task_index`, and load the task again. The class does not derive from Exception,
    because lm-eval skips files whose loading raises an Exception.
    """


def task_index() -> Mapping[str, Any]:
    """The index of all named tasks, groups and tags: lm-eval's object `Entry` for each name.

    The entries come from lm-eval and from this project's own tasks. The first call in a process loads the index. The
    part for lm-eval is then read from the cache, or built if the cache does not have it. If another process has sent
    its index (function `use_index`), the result is that index.
    """
    return _given or _loaded_index()


def index_if_loaded() -> Mapping[str, Any] | None:
    """The index of all named tasks, if this process has already loaded it; None otherwise.

    For each name, the index has lm-eval's object `Entry`, which says where the task is defined.
    """
    return task_index() if _given or _loaded_index.cache_info().currsize else None


def index_at_hand() -> Mapping[str, Any]:
    """Index of all named tasks if this process has loaded it; otherwise IndexNeeded is raised.

    The index has lm-eval's object `Entry` for each name. This function is for callers that cannot load the index
    themselves, because they have patched how lm-eval reads files.
    """
    found = index_if_loaded()
    if found is None:
        raise IndexNeeded
    return found


def index_to_send() -> PlainIndex | None:
    """The index of named tasks in plain types, to send to another process; None if it is not loaded.

    The result maps each name to (kind, path of the YAML file or None, tags). lm-eval's own objects are not sent: a
    process that receives them must import lm-eval, and the import may start threads. A sandboxed process receives the
    index before it is confined, and a process with several threads cannot be confined.
    """
    index = index_if_loaded()
    return None if index is None else {name: _plain(entry) for name, entry in index.items()}


def use_index(index: PlainIndex) -> None:
    """Replace this process's index of named tasks by `index`, which another process has loaded and sent."""
    _given.clear()
    _given.update((name, _entry(name, *each)) for name, each in index.items())


def manager_of(index: Mapping[str, Any]) -> Any:
    """Make lm-eval's TaskManager, the object that finds and loads tasks, for the tasks in `index`.

    `index` has lm-eval's object `Entry` for each name of a task, group or tag.
    """
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    manager._index = dict(index)  # a manager adds to it
    return manager


@lru_cache(maxsize=1)
def shipped_dirs() -> tuple[Path, ...]:
    """The directories of lm-eval's tasks and of this project's tasks, whose files are trusted."""
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).resolve().parent, pack_dir()


def is_shipped(directory: Path) -> bool:
    """Whether `directory` is in a directory of tasks that lm-eval or this project ships."""
    return any(Path(directory).is_relative_to(shipped) for shipped in shipped_dirs())


@lru_cache(maxsize=1)
def _loaded_index() -> Mapping[str, Any]:
    from lm_eval.tasks._index import TaskIndex

    lm_eval_dir, pack = shipped_dirs()
    return {**_lm_eval_index(lm_eval_dir), **TaskIndex.build([pack], resolve_includes=False)}


def _lm_eval_index(directory: Path) -> dict[str, Any]:
    """The index of lm-eval's tasks in `directory`: lm-eval's object `Entry` for each name.

    The index is cached, and built anew if the installed files of lm-eval have changed. If the installation does not
    list its files, each call builds the index.
    """
    from lm_eval.tasks._index import TaskIndex

    content = _content()
    if content is None:
        return dict(TaskIndex.build([directory]))
    key = f"lm-eval's tasks in {directory}: {content}"
    if (found := _read(key)) is not None:
        return found
    with _turn():
        if (found := _read(key)) is not None:  # another process has built it meanwhile
            return found
        index = dict(TaskIndex.build([directory]))
        cached(key, json.dumps({name: _plain(entry) for name, entry in index.items()}))
        return index


def _content() -> str | None:
    """A hash that changes with any file of the installed lm-eval; None if the files are not listed.

    An editable installation, for example, does not list its files.
    """
    try:
        record = distribution("lm_eval").read_text("RECORD")
    except PackageNotFoundError:
        return None
    return hashlib.sha256(record.encode()).hexdigest() if record and TASKS in record else None


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(turn(cache_dir() / "task-index", limit_s=TURN_S))
        except OSError as error:  # a cache that cannot be written, or a process that hangs
            log.warning("this process builds its own index of lm-eval's tasks: %s", error)
        yield


def _read(key: str) -> dict[str, Any] | None:
    text = cached(key)
    return None if text is None else {name: _entry(name, *each) for name, each in json.loads(text).items()}


def _plain(entry: Any) -> tuple[str, str | None, tuple[str, ...]]:
    return entry.kind.name, None if entry.yaml_path is None else str(entry.yaml_path), tuple(sorted(entry.tags))


def _entry(name: str, kind: str, path: str | None, tags: Iterable[str]) -> Any:
    from lm_eval.tasks._index import Entry, Kind

    return Entry(name, Kind[kind], None if path is None else Path(path), tags=set(tags))
