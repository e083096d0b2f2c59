"""Building tasks with lm-eval: by name, from a YAML file, or from an inline JSONL file.

A task whose files name Python functions is not built in this process (`OwnCode`), unless the process is confined.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from workers.errors import InvalidTask
from workers.evaluation.built_tasks import BuiltTask, Subtask, permutation
from workers.evaluation.inline_files import InlineRow, read_inline
from workers.evaluation.task_loading import OwnCode, Recording, confined_loading, guarded_loading, recorded_loading
from workers.file_access import FileAccess
from workers.models.remote import local_file
from workers.object_store import is_object_url
from workers.types import TaskSpec

__all__ = ["MAX_TOKENS", "LoadedTasks", "Prepared", "build", "content_hash", "inline_rows", "prepare"]

FEWSHOT_SEED = 1234  # lm-eval's default, so that few-shot prompts are those of its command line
EXACT_MATCH, PASS_AT_1 = "exact_match", "pass@1"  # the metrics of inline tasks, without and with a program
MEANS = ("mean", "nanmean")
YAML = (".yaml", ".yml")
OUTPUT_TYPES = ("generate_until", "loglikelihood", "multiple_choice")

# The names that a limit of tokens has in lm-eval's generation arguments, the last of those given counts.
MAX_TOKENS = ("max_tokens", "max_new_tokens", "max_gen_toks")

# One of the functions of `task_loading`: makes a context manager of a directory and of the files that may be read.
Loading = Callable[[Path | None, FileAccess | None], AbstractContextManager[None]]


@dataclass(frozen=True)
class Prepared:
    """What a confined process needs to build a task, apart from its TaskSpec.

    `directories` hold the task's files, and `files` are those of them that its code may read. `datasets` has its data,
    as `datasets.load_dataset` returned it, by `task_loading.data_key`. `index` is what lm-eval knows of its own tasks;
    None if the task is a file.
    """

    directories: tuple[str, ...]
    files: tuple[str, ...]
    datasets: Mapping[str, Any]
    index: Mapping[str, Any] | None


class LoadedTasks(dict[str, Any]):
    """lm-eval's tasks by name. `categories` has the names of the tasks of each group within a loaded group."""

    def __init__(self, tasks: Mapping[str, Any]) -> None:
        super().__init__(tasks)
        self.categories: dict[str, tuple[str, ...]] = {}


def build(spec: TaskSpec, *, prepared: Prepared | None = None) -> BuiltTask:
    """Build the lm-eval task or tasks that `spec` names, and fix the order of their samples.

    Python functions that the task's files name are run only if there is `prepared`, which is for confined processes.
    Otherwise such a task raises OwnCode. Raises InvalidTask if the task is unknown or cannot be scored.
    """
    _quieten()
    if isinstance(spec.task, Mapping):
        name = Path(str(spec.task.get("file"))).stem
        rows = inline_rows(spec)
        tasks = {name: _inline_task(name, rows, spec.task, num_fewshot=spec.num_fewshot or 0)}
    elif prepared is None:
        tasks = _load(spec, guarded_loading)
    else:
        tasks = _load(spec, lambda directory, _: confined_loading(directory, prepared.datasets), index=prepared.index)
    if not tasks:
        raise InvalidTask(f"task {_label(spec)!r}: a group without tasks")
    categories = tasks.categories if isinstance(tasks, LoadedTasks) else {}
    subtasks = tuple(
        replace(_subtask(name, task, spec), categories=tuple(c for c, members in categories.items() if name in members))
        for name, task in tasks.items()
    )
    directions = {subtask.higher_is_better for subtask in subtasks}
    types = {subtask.output_type for subtask in subtasks}
    if len(directions) > 1:
        raise InvalidTask(f"task {_label(spec)}: its subtasks disagree on whether larger {spec.metric} is better")
    order = permutation({subtask.name: subtask.num_samples for subtask in subtasks}, seed=spec.permutation_seed)
    return BuiltTask(spec, subtasks, order, directions.pop(), types.pop() if len(types) == 1 else "mixed")


def prepare(spec: TaskSpec) -> Prepared:
    """Load the data of a task without running its code, for `build` in a confined process.

    Raises InvalidTask if files or data cannot be read, or must not be.
    """
    _quieten()
    recording = Recording()
    _load(spec, partial(recorded_loading, recording))
    return Prepared(
        tuple(sorted(map(str, recording.directories))),
        tuple(
            str(file) for directory in sorted(recording.directories) for file in _files_of_task(directory, spec.access)
        ),
        recording.datasets,
        None if _is_file(spec) else _manager().task_index,
    )


def _files_of_task(directory: Path, access: FileAccess | None) -> Iterator[Path]:
    """Yield the files in `directory` that code of a task there may read. Other things may be there too.

    They are the files of the directory itself, and Python and YAML files below it, but not hidden ones, nor those that
    `access` refuses, such as links to files elsewhere.
    """
    for place, folders, names in os.walk(directory):
        folders[:] = [folder for folder in folders if not folder.startswith(".")]
        is_own = Path(place) == directory
        for file in (Path(place, name) for name in names if not name.startswith(".")):
            is_code = file.suffix in (".py", *YAML)
            if (is_own or is_code) and file.is_file() and (access is None or access.refusal(file) is None):
                yield file


def content_hash(file: str | Path) -> str:
    """The sha256 (hex) of the data file `file`, a path or URL. Raises InvalidTask if the file cannot be read."""
    try:
        return hashlib.sha256(local_file(file).read_bytes()).hexdigest()
    except OSError as error:
        raise InvalidTask(f"{file}: cannot be read ({error.strerror})") from error


def _quieten() -> None:
    """Silence lm-eval's warnings about default settings, and the progress bars of lm-eval and `datasets`."""
    import lm_eval.api.task
    from datasets import disable_progress_bars

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    disable_progress_bars()
    lm_eval.api.task.tqdm = _without_bar


def _without_bar(documents: Iterable[Any], **_: Any) -> Iterable[Any]:
    return documents


# Inline tasks


def inline_rows(spec: TaskSpec) -> list[InlineRow]:
    assert isinstance(spec.task, Mapping)
    label = _label(spec)
    if "file" not in spec.task:
        raise InvalidTask(f"inline task: no file; found only {', '.join(sorted(spec.task)) or 'nothing'}")
    has_program = spec.task.get("program") is not None
    if spec.metric != (metric := PASS_AT_1 if has_program else EXACT_MATCH):
        kind = "an inline task with a program" if has_program else "an inline task"
        raise InvalidTask(f"task {label}: unknown metric {spec.metric!r}; {kind} has {metric}", "metric")
    if spec.filter not in (None, "none"):
        raise InvalidTask(f"task {label}: unknown filter {spec.filter!r}; an inline task has none", "filter")
    if spec.split is not None:
        message = f"task {label}: split {spec.split!r}: an inline file has no splits; use one file for each"
        raise InvalidTask(message, "split")
    if int(spec.task.get("max_tokens", 64)) < 1:
        raise InvalidTask(f"task {label}: max_tokens is {spec.task['max_tokens']}; give at least 1", "task.max_tokens")
    _check_access(spec, spec.task["file"])
    _check_content(spec, spec.task["file"])
    rows = read_inline(spec.task)
    if (spec.num_fewshot or 0) >= len(rows):
        message = f"task {label}: num_fewshot {spec.num_fewshot} needs more than its {len(rows)} samples"
        raise InvalidTask(message, "num_fewshot")
    return rows


def _check_access(spec: TaskSpec, file: str | Path) -> None:
    if spec.access is not None and (reason := spec.access.refusal(file)):
        raise InvalidTask(reason)


def _check_content(spec: TaskSpec, file: str | Path) -> None:
    if spec.content is not None and content_hash(file) != spec.content:
        raise InvalidTask(f"{file}: has changed since the study was planned; restore it or start a new study")


def _inline_task(name: str, rows: Sequence[InlineRow], task: Mapping[str, Any], *, num_fewshot: int) -> Any:
    """Make an lm-eval task of `rows`, the samples of a JSONL file.

    A greedy completion is right if it equals the whole answer, apart from white space at its ends; `executed_task`
    judges those of tasks with a program. `task` has the further settings of the inline task, such as `max_tokens`.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    columns = {"prompt": [row.prompt for row in rows], "answer": [row.answer for row in rows]}

    def exact_match(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
        return {"exact_match": float(results[0].strip() == doc["answer"].strip())}

    # Functions, because lm-eval would evaluate a template's answer that looks like a list.
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": Dataset.from_dict(columns)},
            "test_split": "test",
            "fewshot_split": "test",
            "num_fewshot": num_fewshot,
            "output_type": "generate_until",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_target": lambda doc: doc["answer"],
            "target_delimiter": "",
            "fewshot_delimiter": "\n",
            "process_results": exact_match,
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                for metric in (EXACT_MATCH, PASS_AT_1)
            ],
            "generation_kwargs": {
                "until": list(task.get("until", ("\n",))),
                "max_gen_toks": int(task.get("max_tokens", 64)),
                "do_sample": False,
            },
        }
    )


# lm-eval's own tasks


def _load(spec: TaskSpec, loading: Loading, *, index: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Let lm-eval load the tasks of `spec`, by name; `index` is what it knows of its own tasks, if known."""
    assert isinstance(spec.task, str)
    return _from_yaml(spec.task, spec, loading) if _is_file(spec) else _from_name(spec.task, loading, index)


def _from_name(name: str, loading: Loading, index: Mapping[str, Any] | None) -> dict[str, Any]:
    manager = _manager() if index is None else _indexed(index)
    if name not in manager.task_index:
        nearest = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
        raise InvalidTask(
            f"task {name!r}: lm-eval knows no such task"
            + (f"; nearest are {', '.join(nearest)}" if nearest else "; `lm-eval ls tasks` lists them")
        )
    with loading(None, None):
        return _loaded(manager, name, label=name)


def _from_yaml(name: str, spec: TaskSpec, loading: Loading) -> dict[str, Any]:
    _check_access(spec, name)
    file, access = local_file(name).absolute(), spec.access
    if not file.is_file():
        raise InvalidTask(f"task {str(file)!r}: no such file")
    _check_content(spec, name)
    if is_object_url(name):  # the folder of its download may be read; Python functions in it are not trusted
        access = (access or FileAccess((os.sep,))).allowing([str(file.parent)])
    # Data files are relative to the task file, not to the directory of the process.
    with loading(file.parent, access):
        return _load_yaml(file)


def _load_yaml(file: Path) -> dict[str, Any]:
    from lm_eval.tasks import TaskManager
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        config = load_yaml(file, resolve_func=False)
    except InvalidTask as error:
        raise InvalidTask(f"{file}: {error}") from error
    except Exception as error:  # YAML of any origin, and its includes
        raise InvalidTask(f"{file}: not an lm-eval task: {error}") from error
    if not isinstance(config, dict) or not ({"task", "group"} & set(config)):
        raise InvalidTask(f"{file}: not an lm-eval task: neither `task` nor `group` in it")
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    members = config["task"] if isinstance(config.get("task"), list) else []
    if any(isinstance(member, str) and member not in manager.task_index for member in members):
        manager = TaskManager(include_path=str(file.parent))  # with lm-eval's own tasks, which takes 5-10 s to index
    # A group is loaded by name: loaded by path, its list of tasks is taken for the name.
    return _loaded(manager, str(config["group"]) if "group" in config else str(file), label=str(file))


def _loaded(manager: Any, name: str, *, label: str) -> dict[str, Any]:
    try:
        found = manager.load([name])
    except OwnCode:
        raise
    except InvalidTask as error:
        raise InvalidTask(f"task {label!r}: {error}", error.field) from error
    except Exception as error:  # a task is code and data of any origin: it may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, ConnectionError) or "offline" in str(error).lower():
            raise InvalidTask(
                f"task {label!r}: its data cannot be fetched ({reason}); where there is no network, use an lm-eval "
                "YAML file or an inline JSONL task over local files, or fill the Hugging Face cache beforehand"
            ) from error
        raise InvalidTask(f"task {label!r}: cannot be built: {reason}") from error
    tasks = LoadedTasks(found["tasks"])
    for group in found["groups"].values():
        for inner in group.get_all_groups():
            tasks.categories |= {inner.name: tuple(task.task_name for task in inner.get_all_tasks())}
    return tasks


@lru_cache(maxsize=1)
def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # reads every YAML file of lm-eval: 5-10 s


def _indexed(index: Mapping[str, Any]) -> Any:
    """Make lm-eval's TaskManager of an index that another one has made."""
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_defaults=False)
    manager._index = dict(index)
    return manager


def _subtask(name: str, task: Any, spec: TaskSpec) -> Subtask:
    where = f"task {_label(spec)}" + (f", subtask {name}" if name not in _label(spec) else "")
    if getattr(task, "MULTIMODAL", False):
        raise InvalidTask(f"{where}: needs images or audio; only text tasks can be evaluated")
    _check_metric(task, spec, where)
    if task.OUTPUT_TYPE not in OUTPUT_TYPES:
        raise InvalidTask(f"{where}: output type {task.OUTPUT_TYPE!r} is not one of {', '.join(OUTPUT_TYPES)}")
    if spec.split is not None:
        _use_split(task, spec.split, where)
    if spec.num_fewshot is not None:
        if task.get_config("num_fewshot") == 0 and spec.num_fewshot > 0 and not isinstance(spec.task, Mapping):
            message = f"{where}: num_fewshot {spec.num_fewshot}: the task itself fixes it at 0"
            raise InvalidTask(message, "num_fewshot")
        task.set_config("num_fewshot", spec.num_fewshot)
    elif task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    if spec.max_tokens is not None:
        _use_max_tokens(task, spec.max_tokens, where)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    num_samples = len(task.eval_docs)
    if num_samples == 0:
        raise InvalidTask(f"{where}: holds no samples")
    return Subtask(
        name=name,
        task=task,
        filter=_filter(task, spec, where),
        num_samples=num_samples,
        output_type=str(task.OUTPUT_TYPE),
        higher_is_better=bool(task.higher_is_better().get(spec.metric, True)),
        prefix=str(task.config.gen_prefix or ""),
        delimiter=str(task.config.target_delimiter),
    )


def _check_metric(task: Any, spec: TaskSpec, where: str) -> None:
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    aggregations: Mapping[str, Any] = task.aggregation()
    if spec.metric not in aggregations:
        message = f"{where}: unknown metric {spec.metric!r}; it has {', '.join(sorted(aggregations))}"
        raise InvalidTask(message, "metric")
    function = aggregations[spec.metric]
    names = {registered: name for name, registered in AGGREGATION_REGISTRY.items()}
    name = names.get(function, getattr(function, "__name__", str(function)))
    if name not in MEANS:
        raise InvalidTask(
            f"{where}: metric {spec.metric!r} is aggregated by {name}, not by the mean over samples, so that a part "
            "of the data does not estimate it; choose a metric that is a mean",
            "metric",
        )


def _filter(task: Any, spec: TaskSpec, where: str) -> str:
    names = [str(ensemble.name) for ensemble in task._filters]
    if spec.filter is None:
        return names[0]
    if spec.filter not in names:
        raise InvalidTask(f"{where}: unknown filter {spec.filter!r}; it has {', '.join(names)}", "filter")
    return spec.filter


def _use_max_tokens(task: Any, max_tokens: int, where: str) -> None:
    """Limit the completions of a task; lm-eval knows the limit by several names, of which the task may have any."""
    if task.OUTPUT_TYPE != "generate_until":
        message = f"{where}: max_tokens {max_tokens}: the task scores options and generates no text; leave it out"
        raise InvalidTask(message, "max_tokens")
    arguments = {key: value for key, value in task.get_config("generation_kwargs").items() if key not in MAX_TOKENS}
    task.set_config("generation_kwargs", {**arguments, "max_gen_toks": max_tokens})


def _use_split(task: Any, split: str, where: str) -> None:
    splits = sorted(task.dataset) if isinstance(task.dataset, Mapping) else []
    if split not in splits:
        raise InvalidTask(f"{where}: no split {split!r}; its data has {', '.join(splits) or 'none'}", "split")
    task.set_config("test_split", split)
    task.task_docs = task.eval_docs


def _is_file(spec: TaskSpec) -> bool:
    return Path(str(spec.task)).suffix in YAML


def _label(spec: TaskSpec) -> str:
    return str(spec.task.get("file")) if isinstance(spec.task, Mapping) else spec.task
