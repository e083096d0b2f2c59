"""What lm-eval may read while it builds a task: its YAML files, their Python functions, and data files.

lm-eval resolves includes, groups and overrides itself. Therefore its own loading functions are wrapped while it builds
a task, rather than its files being interpreted a second time.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jinja2.sandbox import SandboxedEnvironment

from workers.errors import InvalidTask
from workers.file_access import FileAccess
from workers.models.remote import without_waiting

__all__ = ["guarded_loading"]

# One task is built at a time, because the wrappers and the working directory apply to the whole process.
_TURN = threading.Lock()

REMOTE = ("https://", "http://", "hf://")

# Keys of `dataset_kwargs` that name directories.
DIRECTORIES = ("data_dir", "cache_dir")


@contextlib.contextmanager
def guarded_loading(directory: Path | None, access: FileAccess | None) -> Iterator[None]:
    """Context manager that limits what lm-eval may read while it builds a task.

    Files outside `access` are refused, unless `access` is None (no limit). Data sets without files are refused too,
    because `datasets` would search the disk for them. Refusals are raised as InvalidTask inside the context. Relative
    paths of data files start at `directory`, or at the current directory if it is None. A hub that cannot be reached is
    not waited for.
    """
    import datasets
    from lm_eval.tasks import _yaml_loader

    _confine_templates()
    with _TURN, contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(datasets, "load_dataset", _data_guard(access)))
        if access is not None:
            stack.enter_context(_wrapped(_yaml_loader, "_make_loader", _yaml_guard(access)))
            stack.enter_context(_wrapped(_yaml_loader, "_import_func_in_yml", _function_guard(access)))
        if directory is not None:
            stack.enter_context(contextlib.chdir(directory))
        yield


def _confine_templates() -> None:
    """Make lm-eval render templates in Jinja's sandbox: templates are data and must not run Python code."""
    from lm_eval import utils

    if not isinstance(utils.env, SandboxedEnvironment):
        confined = SandboxedEnvironment(
            loader=utils.env.loader,
            undefined=utils.env.undefined,
            keep_trailing_newline=utils.env.keep_trailing_newline,
        )
        confined.filters = utils.env.filters
        utils.env = confined


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def _wrapped(module: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, wrapper(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _yaml_guard(access: FileAccess) -> Wrapper:
    """Make a wrapper of lm-eval's `_make_loader(directory)` that refuses YAML files outside `access` (InvalidTask).

    lm-eval calls `_make_loader` for every YAML file, with the file's directory. The files that lm-eval ships are
    allowed.
    """

    def wrapper(make_loader: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(directory: Path, **options: Any) -> Any:
            if not _is_shipped(directory):
                _refuse(access.refusal(directory))
            return make_loader(directory, **options)

        return guarded

    return wrapper


def _function_guard(access: FileAccess) -> Wrapper:
    """Make a wrapper of lm-eval's `_import_func_in_yml(name, directory)` that refuses code outside trusted directories.

    lm-eval calls `_import_func_in_yml` for each Python function (`!function`) that a YAML file in `directory` names.
    `access` says which directories are trusted; lm-eval's own are, too. The refusal is an InvalidTask.
    """

    def wrapper(import_function: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(name: str, directory: Path) -> Any:
            if not _is_shipped(directory):
                _refuse(access.distrust(directory))
            return import_function(name, directory)

        return guarded

    return wrapper


def _data_guard(access: FileAccess | None) -> Wrapper:
    """Make a wrapper of `datasets.load_dataset` that refuses data files outside `access` (InvalidTask).

    If `access` is None, any file is allowed. A call with a file format such as "json" and without files is always
    refused, because `datasets` would search every directory below the current one.
    """

    def wrapper(load_dataset: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(path: str, name: str | None = None, **options: Any) -> Any:
            from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES

            if not isinstance(path, str):  # none was given, which `datasets` reports
                return load_dataset(path=path, name=name, **options)
            is_format = path in _PACKAGED_DATASETS_MODULES
            if is_format and not (options.get("data_files") or options.get("data_dir")):
                raise InvalidTask(
                    f"dataset_path: {path} is a file format, and no files are given: every directory below "
                    f"{os.getcwd()} would be searched; write `dataset_kwargs: {{data_files: FILE}}` with it"
                )
            if access is not None:
                for file in _local_files(path, options, is_format=is_format):
                    _refuse(access.refusal_of_all(file))
            is_local = is_format or os.path.isdir(path)
            with contextlib.nullcontext() if is_local else without_waiting():
                return load_dataset(path=path, name=name, **options)

        return guarded

    return wrapper


def _local_files(path: str, options: Mapping[str, Any], *, is_format: bool) -> Iterator[Path]:
    """The files and directories on this machine that a call of `datasets.load_dataset` would read or write.

    `path` and `options` are the arguments of the call; `is_format` says that `path` names a file format such as "json".
    Raises InvalidTask for data files that are neither local, nor on the web or the hub.
    """
    for key in DIRECTORIES:
        if directory := options.get(key):
            yield _place(str(directory))
    base = Path(options.get("data_dir") or "").expanduser()
    if not is_format and os.path.exists(path):
        yield _place(path)
        base = Path(path) / base
    for pattern in _texts(options.get("data_files")):
        if "://" in pattern or "::" in pattern:
            if not pattern.startswith(REMOTE) or "::" in pattern:
                raise InvalidTask(f"data_files: {pattern} is not accepted; give a path, or an https or hf address")
            continue
        yield from _matches(base / Path(pattern).expanduser())


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield the directory above the first wildcard of the path `pattern`, then every file that the path matches.

    Only the path itself is yielded if it has no wildcards.
    """
    text = str(_place(str(pattern)))
    if not glob.has_magic(text):
        yield Path(text)
        return
    parts = Path(text).parts
    first = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    yield from (_place(os.path.join(*parts[:first])), *map(Path, glob.iglob(text, recursive=True)))


def _place(path: str) -> Path:
    return Path(os.getcwd(), Path(path).expanduser())


def _texts(value: Any) -> Iterator[str]:
    """Yield all strings in `value`, which may be nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (text for inner in value.values() for text in _texts(inner))
    elif isinstance(value, list | tuple):
        yield from (text for inner in value for text in _texts(inner))


def _is_shipped(directory: Path) -> bool:
    """Whether `directory` is in lm-eval's own directory of tasks."""
    return Path(directory).is_relative_to(_shipped_dir())


@functools.cache
def _shipped_dir() -> Path:
    import lm_eval.tasks

    return Path(lm_eval.tasks.__file__).resolve().parent


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise InvalidTask(reason)
