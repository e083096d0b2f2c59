"""Limits on what lm-eval reads and runs while it builds a task: YAML files, Python functions, and data files.

lm-eval itself resolves the includes, groups and overrides of a task. Therefore its loading functions are wrapped while
it builds a task; its files are not interpreted a second time. There are three ways to load a task:

- `guarded_loading`: in this process, for tasks without Python functions of their own; OwnCode is raised for other tasks
- `recorded_loading`: in this process, to load a task's data and nothing else
- `confined_loading`: in a confined process, with the data that were loaded before
"""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jinja2 import Template
from jinja2.sandbox import SandboxedEnvironment

from workers.errors import InvalidTask
from workers.evaluation.data_sets import data_dir, load
from workers.evaluation.task_index import index_at_hand, is_shipped
from workers.file_access import FileAccess

__all__ = ["OwnCode", "Recording", "confined_loading", "data_key", "guarded_loading", "is_address", "recorded_loading"]

# One task is built at a time, because the wrappers and the working directory apply to the whole process.
_TURN = threading.Lock()

# Data files of the hub, the only ones over a network that a study with limits may name: other addresses could be those
# of internal services.
HUB = "hf://"

# Key of `dataset_kwargs` that lm-eval leaves out.
TRUST = "trust_remote_code"

# Keys of `dataset_kwargs` that name directories, and those that can direct requests to other hosts.
DIRECTORIES = ("data_dir", "cache_dir")
CONNECTIONS = ("storage_options", "download_config")

# Compiled templates that are kept; a task has a few.
MAX_TEMPLATES = 512

# Modules of `datasets` that read nothing but the data files that they are given; "cache" reads the hub's data again.
FORMATS = ("arrow", "cache", "csv", "json", "parquet", "text")


class OwnCode(Exception):
    """Raised if a task's files name a Python function, so that the task must be built in a sandboxed process."""


@dataclass
class Recording:
    """Record of the directories and data of tasks, made by the context manager `recorded_loading`.

    `directories` are the directories of all YAML files that were read. `datasets` has the data of each task, as
    `datasets.load_dataset` returned them; its keys are those that the function `data_key` makes from the arguments of
    the call.
    """

    directories: set[Path] = field(default_factory=set)
    datasets: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def guarded_loading(directory: Path | None, access: FileAccess | None) -> Iterator[None]:
    """Context manager that limits what lm-eval may read while it builds a task, and prevents it from running code.

    A task whose files name Python functions raises OwnCode inside the context, before any of them is imported. The
    following are refused, which raises InvalidTask inside the context:

    - files that `access` does not allow, even if a data set itself names them, and addresses of other hosts than the
      hub; if `access` is None, there is no such limit
    - data sets that name a file format but no files, because the package `datasets` would search the disk for files
    - metrics that are not lm-eval's own

    Relative paths of data files start at `directory`, or at the current directory if it is None. Loading does not wait
    for a hub that cannot be reached.
    """
    from lm_eval.tasks import _yaml_loader

    with _limited_loading(directory, access) as stack:
        stack.enter_context(_wrapped(_yaml_loader, "_import_func_in_yml", lambda _: _function_guard(access)))
        yield


@contextlib.contextmanager
def recorded_loading(recording: Recording, directory: Path | None, access: FileAccess | None) -> Iterator[None]:
    """Context manager that makes lm-eval load the data sets of tasks, but build placeholders instead of tasks.

    The data sets are stored in `recording`. Python functions that the files of tasks name are not imported.
    `access` limits the files that may be read; None means no limit. Relative paths of data files start at `directory`,
    or at the current directory if it is None.
    """
    from lm_eval.tasks import _factory, _yaml_loader

    def note_directory(make_loader: Callable[..., Any]) -> Callable[..., Any]:
        def noted(directory: Path, **options: Any) -> Any:
            made = make_loader(directory, **options)
            recording.directories.add(Path(directory))
            return made

        return noted

    def load(config: Mapping[str, Any]) -> Any:
        import datasets

        path, name = config.get("dataset_path"), config.get("dataset_name")
        options = {key: value for key, value in (config.get("dataset_kwargs") or {}).items() if key != TRUST}
        key = data_key(path, name, options)
        if path is not None and key not in recording.datasets:
            recording.datasets[key] = datasets.load_dataset(path=path, name=name, **options)
        return SimpleNamespace(task_name=config["task"])

    def build_task(_: Callable[..., Any]) -> Callable[..., Any]:
        return lambda factory, entry, overrides: load(factory._load_full_config(entry, overrides))

    with _limited_loading(directory, access) as stack:
        stack.enter_context(_wrapped(_yaml_loader, "_make_loader", note_directory))
        stack.enter_context(_wrapped(_yaml_loader, "_import_func_in_yml", lambda _: _function_guard(access, name=str)))
        stack.enter_context(_wrapped(_factory.TaskFactory, "_build_task", build_task))
        stack.enter_context(_wrapped(_factory, "ConfigurableTask", lambda _: lambda config: load(config)))
        yield


@contextlib.contextmanager
def confined_loading(directory: Path | None, data: Mapping[str, Any]) -> Iterator[None]:
    """Context manager in which lm-eval builds tasks with their own Python functions, in a sandboxed process.

    `data` has the data sets that another process has loaded (field `Recording.datasets`), because a sandboxed process
    cannot load data itself. Inside the context, a task that needs another data set raises InvalidTask. `directory` is
    the current directory inside the context; None does not change it.
    """
    import datasets
    import lm_eval.api.task
    from lm_eval.tasks import _yaml_loader

    def given(_: Callable[..., Any]) -> Callable[..., Any]:
        def load_dataset(path: str, name: str | None = None, **options: Any) -> Any:
            options.pop(TRUST, None)
            try:
                return data[data_key(path, name, options)]
            except KeyError:
                raise InvalidTask(
                    f"its code loads the data set {path!r}, which its YAML file does not name: code of tasks has "
                    "no network and reads no other files; name the data in dataset_path, dataset_name, dataset_kwargs"
                ) from None

        return load_dataset

    _confine_templates()
    with _TURN, contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(datasets, "load_dataset", given))
        stack.enter_context(_wrapped(lm_eval.api.task, "get_metric", _metric_guard))
        stack.enter_context(_wrapped(_yaml_loader, "load_yaml", _includes_by_name))
        if directory is not None:
            stack.enter_context(contextlib.chdir(directory))
        yield


def data_key(path: str | None, name: str | None, options: Mapping[str, Any]) -> str:
    """A key for a data set: a text that is equal for equal arguments of the function `datasets.load_dataset`.

    `path`, `name` and `options` are the arguments: the data set, its configuration, and the keyword arguments.
    """
    return json.dumps([path, name, dict(options)], sort_keys=True, default=str)


@contextlib.contextmanager
def guarded_data_sets(access: FileAccess | None) -> Iterator[None]:
    """Context manager that lets the package `datasets` read only data that `access` allows; None is no limit.

    The files of data sets must be on the hub, in the directory of the user's own copies, or in places that `access`
    allows. Their format must be one that cannot refer to further files. Otherwise InvalidTask is raised.
    """
    import datasets

    if access is None:
        yield
        return
    if (own := data_dir()) is not None:  # which the operator has chosen
        access = access.allowing([str(own)])
    with (
        _TURN,
        _wrapped(datasets.data_files, "resolve_pattern", _pattern_guard(access)),
        _wrapped(datasets.load, "dataset_module_factory", _format_guard),
    ):
        yield


@contextlib.contextmanager
def _limited_loading(directory: Path | None, access: FileAccess | None) -> Iterator[contextlib.ExitStack]:
    import datasets
    import lm_eval.api.task
    from lm_eval.tasks import _yaml_loader

    _confine_templates()
    if access is not None and (own := data_dir()) is not None:  # which the operator has chosen
        access = access.allowing([str(own)])
    with _TURN, contextlib.ExitStack() as stack:
        stack.enter_context(_wrapped(datasets, "load_dataset", _data_guard(access)))
        stack.enter_context(_wrapped(lm_eval.api.task, "get_metric", _metric_guard))
        stack.enter_context(_wrapped(_yaml_loader, "load_yaml", _includes_by_name))
        if access is not None:
            stack.enter_context(_wrapped(datasets.data_files, "resolve_pattern", _pattern_guard(access)))
            stack.enter_context(_wrapped(datasets.load, "dataset_module_factory", _format_guard))
            stack.enter_context(_wrapped(_yaml_loader, "_make_loader", _yaml_guard(access)))
        if directory is not None:
            stack.enter_context(contextlib.chdir(directory))
        yield stack


def _confine_templates() -> None:
    """Make lm-eval render templates in Jinja's sandbox, because templates must not run Python code."""
    from lm_eval import utils

    if not isinstance(utils.env, SandboxedEnvironment):
        confined = _Templates(
            loader=utils.env.loader,
            undefined=utils.env.undefined,
            keep_trailing_newline=utils.env.keep_trailing_newline,
        )
        confined.filters = utils.env.filters
        utils.env = confined


class _Templates(SandboxedEnvironment):
    """Jinja's sandbox, which keeps compiled templates: lm-eval asks for a task's template again for every document."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._compiled = functools.lru_cache(MAX_TEMPLATES)(super().from_string)

    def from_string(self, source: Any, *arguments: Any, **options: Any) -> Template:
        if arguments or options or not isinstance(source, str):
            return super().from_string(source, *arguments, **options)
        return self._compiled(source)


Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


@contextlib.contextmanager
def _wrapped(module: Any, name: str, wrapper: Wrapper) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, wrapper(original))
    try:
        yield
    finally:
        setattr(module, name, original)


def _includes_by_name(load_yaml: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of lm-eval's `load_yaml(path)` that also accepts the name of a registered task in `include`.

    For `include: gsm8k`, lm-eval calls `load_yaml` with the path `gsm8k` in the directory of the including file. If
    there is no file at this path, the YAML file of the task of this name is loaded. Raises IndexNeeded if the index of
    names is not loaded yet.
    """

    def loaded(path: str | Path, **options: Any) -> Any:
        path = Path(path)
        if not path.suffix and not path.exists() and (named := index_at_hand().get(path.name)):
            path = named.yaml_path or path
        return load_yaml(path, **options)

    return loaded


def _yaml_guard(access: FileAccess) -> Wrapper:
    """Make a wrapper of lm-eval's function `_make_loader` that refuses YAML files outside a study's file access.

    lm-eval calls `_make_loader(directory)` for every YAML file, with the file's directory. The wrapper raises
    InvalidTask if `access` does not allow the directory. The files of shipped tasks are allowed.
    """

    def wrapper(make_loader: Callable[..., Any]) -> Callable[..., Any]:
        def guarded(directory: Path, **options: Any) -> Any:
            if not is_shipped(directory):
                _refuse(access.refusal(directory))
            return make_loader(directory, **options)

        return guarded

    return wrapper


def _function_guard(access: FileAccess | None, *, name: Callable[[str], Any] | None = None) -> Callable[..., Any]:
    """Make a replacement of lm-eval's `_import_func_in_yml(function, directory)` that imports no code.

    lm-eval calls this function for each Python function (`!function`) that a YAML file in `directory` names. The
    replacement raises InvalidTask if `access` does not trust the directory. Without `access` all directories are
    trusted, and directories of shipped tasks always are. For a trusted directory the replacement raises OwnCode, which
    tells the caller to build the task in a sandbox; or, if `name` is given, it returns `name(function)`.
    """

    def guarded(function: str, directory: Path) -> Any:
        if access is not None and not is_shipped(directory):
            _refuse(access.distrust(directory))
        if name is None:
            raise OwnCode(function)
        return name(function)

    return guarded


def _data_guard(access: FileAccess | None) -> Wrapper:
    """Make a wrapper of the function `datasets.load_dataset` that refuses data files outside a study's file access.

    The wrapper raises InvalidTask if `access` does not allow a directory of the data; if `access` is None, any file is
    allowed. A call that names a file format such as "json" but no files is always refused, because the package
    `datasets` would search every directory below the current directory.
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
                if forbidden := [key for key in CONNECTIONS if options.get(key)]:
                    raise InvalidTask(f"dataset_kwargs: {forbidden[0]} is not accepted, since it can name other hosts")
                for directory in _directories(path, options, is_format=is_format):
                    _refuse(access.refusal_of_all(directory))
            found = load(load_dataset, path, name, options)
            if access is not None:
                _refuse_media(found)
            return found

        return guarded

    return wrapper


def _directories(path: str, options: Mapping[str, Any], *, is_format: bool) -> Iterator[Path]:
    """The directories on this machine that a call of the function `datasets.load_dataset` would read or write.

    `path` and `options` are the arguments of the call. `is_format` says whether `path` names a file format such as
    "json". Raises InvalidTask if a directory is given by an address, such as a URL.
    """
    for key in DIRECTORIES:
        if directory := options.get(key):
            if is_address(str(directory)):
                raise InvalidTask(f"{key}: {directory} is not accepted; give the path of a directory")
            yield _place(str(directory))
    if not is_format and os.path.exists(path):
        yield _place(path)


def _pattern_guard(access: FileAccess) -> Wrapper:
    """Make a wrapper of `resolve_pattern` of `datasets` that refuses data files outside a study's file access.

    The package `datasets` calls `resolve_pattern(pattern, base_path)` for all data files, whether the task's key
    `dataset_kwargs` names them or the README.md of a data set. The wrapper raises InvalidTask for a file that `access`
    does not allow.
    """

    def wrapper(resolve_pattern: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def guarded(pattern: str, base_path: str, *args: Any, **options: Any) -> list[str]:
            place = pattern if is_address(pattern) or os.path.isabs(pattern) else base_path
            if is_address(place):
                _refuse(_address_problem(pattern if place == pattern else f"{base_path}/{pattern}"))
            else:
                for match in _matches(Path(base_path, Path(pattern).expanduser())):
                    _refuse(access.refusal_of_all(match))
            found = resolve_pattern(pattern, base_path, *args, **options)
            for file in found:  # what fsspec made of the pattern
                _refuse(_address_problem(file) if is_address(file) else access.refusal(file))
            return found

        return guarded

    return wrapper


def is_address(text: str) -> bool:
    """Whether fsspec reads `text` as an address, such as https://host/file or a chain of addresses (zip::file)."""
    return "://" in text or "::" in text


def _address_problem(address: str) -> str | None:
    """Reason why the data file at `address` may not be read by a study whose file access is limited; None if it may be.

    Only files on the hub may be read by address.
    """
    if address.startswith(HUB) and "::" not in address:
        return None
    return (
        f"data_files: {address} is not accepted, since it may lead to an internal service; give a path, such as that "
        "of a file beside the task file, or an hf address"
    )


def _format_guard(factory: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of `factory` that raises InvalidTask for data sets in file formats outside FORMATS.

    `factory` is the function that selects the loader of a data set: `dataset_module_factory` of the package `datasets`.
    Files of other formats may refer to further files, which the study may not be allowed to read.
    """

    @functools.wraps(factory)
    def guarded(path: str, *args: Any, **options: Any) -> Any:
        module = factory(path, *args, **options)
        if (name := str(module.module_path).rpartition(".")[2]) not in FORMATS:
            raise InvalidTask(f"dataset_path: {path} has data of the format {name}; expected {', '.join(FORMATS)}")
        return module

    return guarded


def _metric_guard(get_metric: Callable[..., Any]) -> Callable[..., Any]:
    """Wrapper of lm-eval's `get_metric(name)` that raises InvalidTask for metrics from outside of lm-eval.

    Other metrics are Python files on this machine or the hub, which the package `evaluate` would run.
    """

    def guarded(name: str, from_evaluate: bool = False) -> Any:
        import lm_eval.api.metrics
        from lm_eval.api.registry import METRIC_REGISTRY

        del lm_eval
        if from_evaluate or name not in METRIC_REGISTRY:
            raise InvalidTask(f"unknown metric {name!r}; only metrics of lm-eval itself are accepted", "metric")
        return get_metric(name)

    return guarded


def _refuse_media(data: Any) -> None:
    """Raise InvalidTask if the loaded `data` have columns with media such as images.

    The package `datasets` would open the files whose paths are in these columns.
    """
    from datasets import Dataset, DatasetDict
    from datasets.features.features import Json, _visit

    def check(feature: Any) -> None:
        if hasattr(feature, "decode_example") and not isinstance(feature, Mapping | Json):
            raise InvalidTask(f"its data have columns of type {type(feature).__name__}; expected text and numbers")

    for split in data.values() if isinstance(data, DatasetDict) else (data,):
        if not isinstance(split, Dataset):
            raise InvalidTask(f"dataset_kwargs: gives {type(split).__name__}, not the data of all splits")
        _visit(split.features, check)


def _matches(pattern: Path) -> Iterator[Path]:
    """Yield each path that a pattern of data files reads, so that its access can be checked.

    For a pattern with wildcards, the paths are the directory above the first wildcard, then every file that the pattern
    matches. For a pattern without wildcards, the only path is the pattern itself.
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


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise InvalidTask(reason)
