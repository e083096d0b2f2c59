"""Building and checking the task of a TaskSpec, and the order of its samples.

A task is a name registered with lm-eval, an lm-eval YAML file, or an inline JSONL file. Metrics, filters and prompts
are lm-eval's. Models and tokenizers are not needed: `check_task` runs without an engine, and for inline tasks even
without lm-eval.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from workers.errors import InvalidTask
from workers.evaluation.inline_files import InlineRow, read_inline
from workers.evaluation.task_loading import guarded_loading
from workers.file_access import FileAccess
from workers.models.remote import local_file
from workers.object_store import is_object_url
from workers.types import TaskInfo, TaskSpec

__all__ = [
    "BuiltTask",
    "Subtask",
    "build_task",
    "check_task",
    "content_hash",
    "permutation",
]

FEWSHOT_SEED = 1234  # lm-eval's default, so that few-shot prompts are those of its command line
INLINE_METRICS = ("exact_match",)
MEANS = ("mean", "nanmean")
EXECUTES_CODE = re.compile(r"human_?eval|mbpp", re.IGNORECASE)
OUTPUT_TYPES = ("generate_until", "loglikelihood", "multiple_choice")


@dataclass(frozen=True)
class Subtask:
    """One lm-eval task of the several that a task may consist of.

    `task` is lm-eval's object, `filter` the name of the lm-eval filter whose results are used.
    """

    name: str
    task: Any
    filter: str
    num_samples: int


@dataclass(frozen=True)
class BuiltTask:
    """A task that is ready to be scored, with the order of its samples.

    `order[position]` is the sample at `position`, as (index of the subtask, index of the document), both from 0.
    """

    spec: TaskSpec
    subtasks: tuple[Subtask, ...]
    order: tuple[tuple[int, int], ...]
    higher_is_better: bool
    output_type: str

    def document(self, position: int) -> str:
        """A name of the sample at `position` of the order.

        It is the sample's index in the task's data, after the name of its subtask if there are several.
        """
        subtask, index = self.order[position]
        return f"{self.subtasks[subtask].name}/{index}" if len(self.subtasks) > 1 else str(index)

    @property
    def info(self) -> TaskInfo:
        groups = {subtask.name: subtask.num_samples for subtask in self.subtasks} if len(self.subtasks) > 1 else {}
        return TaskInfo(len(self.order), self.higher_is_better, self.output_type, groups=groups)


def check_task(spec: TaskSpec) -> TaskInfo:
    """Facts about a task, found without an engine or tokenizer.

    Prompts that are too long are not counted, because that needs a tokenizer. Raises InvalidTask for an unknown task,
    metric, filter or split; for malformed or missing data; for a metric that is not a mean over samples; for a task
    that executes generated code; and for a file outside the task's `access`.
    """
    if isinstance(spec.task, Mapping):
        return TaskInfo(len(_inline_rows(spec)), higher_is_better=True, output_type="generate_until")
    return build_task(spec).info


def build_task(spec: TaskSpec) -> BuiltTask:
    """Build the lm-eval task or tasks that `spec` names, and fix the order of their samples.

    Raises InvalidTask if the task is unknown or cannot be scored (see `check_task`).
    """
    _quieten()
    if isinstance(spec.task, Mapping):
        name = Path(str(spec.task.get("file"))).stem
        rows = _inline_rows(spec)
        tasks = {name: _inline_task(name, rows, spec.task, num_fewshot=spec.num_fewshot or 0)}
    elif Path(spec.task).suffix in (".yaml", ".yml"):
        tasks = _from_yaml(spec.task, spec)
    else:
        tasks = _from_name(spec.task)
    subtasks = tuple(_subtask(name, task, spec) for name, task in tasks.items())
    directions = {bool(subtask.task.higher_is_better().get(spec.metric, True)) for subtask in subtasks}
    types = {str(subtask.task.OUTPUT_TYPE) for subtask in subtasks}
    if len(directions) > 1:
        raise InvalidTask(f"task {_label(spec)}: its subtasks disagree on whether larger {spec.metric} is better")
    order = permutation({subtask.name: subtask.num_samples for subtask in subtasks}, seed=spec.permutation_seed)
    return BuiltTask(spec, subtasks, order, directions.pop(), types.pop() if len(types) == 1 else "mixed")


def permutation(sizes: Mapping[str, int], *, seed: int) -> tuple[tuple[int, int], ...]:
    """All (group, index) pairs in one random order in which every prefix has the groups in proportion to their sizes.

    `sizes` maps a group's name to its number of samples. Groups of equal size differ by at most one sample in any
    prefix. The order depends on names, sizes and seed only, not on the version of a random generator.
    """

    def draw(name: str, index: int) -> bytes:
        return hashlib.sha256(f"{seed}\0{name}\0{index}".encode()).digest()

    places: list[tuple[float, bytes, int, int]] = []
    for group, (name, size) in enumerate(sizes.items()):
        shuffled = sorted(range(size), key=lambda index, name=name: draw(name, index))  # type: ignore[misc]
        # The j-th of n samples of a group is at (j + 1/2)/n of the whole order; ties are in random order.
        places.extend(((j + 0.5) / size, draw(name, index), group, index) for j, index in enumerate(shuffled))
    return tuple((group, index) for _, _, group, index in sorted(places))


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


def _inline_rows(spec: TaskSpec) -> list[InlineRow]:
    assert isinstance(spec.task, Mapping)
    label = _label(spec)
    if "file" not in spec.task:
        raise InvalidTask(f"inline task: no file; found only {', '.join(sorted(spec.task)) or 'nothing'}")
    if spec.metric not in INLINE_METRICS:
        message = f"task {label}: unknown metric {spec.metric!r}; an inline task has {INLINE_METRICS[0]}"
        raise InvalidTask(message, "metric")
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

    A greedy completion is right if it equals the whole answer, apart from white space at its ends. `task` has the
    further settings of the inline task, such as `max_tokens`.
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
            "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
            "generation_kwargs": {
                "until": list(task.get("until", ("\n",))),
                "max_gen_toks": int(task.get("max_tokens", 64)),
                "do_sample": False,
            },
        }
    )


# lm-eval's own tasks


def _from_name(name: str) -> dict[str, Any]:
    if EXECUTES_CODE.search(name):
        raise InvalidTask(_executes_code(name))
    manager = _manager()
    if name not in manager.task_index:
        nearest = difflib.get_close_matches(name, manager.all_tasks, n=3, cutoff=0.5)
        raise InvalidTask(
            f"task {name!r}: lm-eval knows no such task"
            + (f"; nearest are {', '.join(nearest)}" if nearest else "; `lm-eval ls tasks` lists them")
        )
    with guarded_loading(None, None):
        return _load(manager, name, label=name)


def _from_yaml(name: str, spec: TaskSpec) -> dict[str, Any]:
    _check_access(spec, name)
    file, access = local_file(name).absolute(), spec.access
    if not file.is_file():
        raise InvalidTask(f"task {str(file)!r}: no such file")
    _check_content(spec, name)
    if is_object_url(name):  # the folder of its download may be read; Python functions in it are not trusted
        access = (access or FileAccess((os.sep,))).allowing([str(file.parent)])
    # Data files are relative to the task file, not to the directory of the process.
    with guarded_loading(file.parent, access):
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
    if config.get("unsafe_code"):
        raise InvalidTask(_executes_code(str(file)))
    manager = TaskManager(include_path=str(file.parent), include_defaults=False)
    members = config["task"] if isinstance(config.get("task"), list) else []
    if any(isinstance(member, str) and member not in manager.task_index for member in members):
        manager = TaskManager(include_path=str(file.parent))  # with lm-eval's own tasks, which takes 5-10 s to index
    # A group is loaded by name: loaded by path, its list of tasks is taken for the name.
    return _load(manager, str(config["group"]) if "group" in config else str(file), label=str(file))


def _load(manager: Any, name: str, *, label: str) -> dict[str, Any]:
    try:
        tasks: dict[str, Any] = manager.load([name])["tasks"]
    except InvalidTask as error:
        raise InvalidTask(f"task {label!r}: {error}") from error
    except Exception as error:  # a task is code and data of any origin: it may raise anything
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        if isinstance(error, ConnectionError) or "offline" in str(error).lower():
            raise InvalidTask(
                f"task {label!r}: its data cannot be fetched ({reason}); where there is no network, use an lm-eval "
                "YAML file or an inline JSONL task over local files, or fill the Hugging Face cache beforehand"
            ) from error
        raise InvalidTask(f"task {label!r}: cannot be built: {reason}") from error
    if not tasks:
        raise InvalidTask(f"task {label!r}: a group without tasks")
    return tasks


@lru_cache(maxsize=1)
def _manager() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()  # reads every YAML file of lm-eval: 5-10 s


def _subtask(name: str, task: Any, spec: TaskSpec) -> Subtask:
    where = f"task {_label(spec)}" + (f", subtask {name}" if name not in _label(spec) else "")
    if getattr(task, "UNSAFE_CODE", False) or EXECUTES_CODE.search(name):
        raise InvalidTask(_executes_code(name))
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
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    num_samples = len(task.eval_docs)
    if num_samples == 0:
        raise InvalidTask(f"{where}: holds no samples")
    return Subtask(name, task, _filter(task, spec, where), num_samples)


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


def _use_split(task: Any, split: str, where: str) -> None:
    splits = sorted(task.dataset) if isinstance(task.dataset, Mapping) else []
    if split not in splits:
        raise InvalidTask(f"{where}: no split {split!r}; its data has {', '.join(splits) or 'none'}", "split")
    task.set_config("test_split", split)
    task.task_docs = task.eval_docs


def _executes_code(name: str) -> str:
    return f"task {name!r}: executes code that the model writes; such tasks are refused, because there is no sandbox"


def _label(spec: TaskSpec) -> str:
    return str(spec.task.get("file")) if isinstance(spec.task, Mapping) else spec.task


def documents_of(task: Any) -> Iterator[list[Any]]:
    """Yield the requests (`Instance` objects) of each document of an lm-eval task, in document order.

    The task must have built its requests before.
    """
    by_document: dict[int, list[Any]] = {}
    for instance in task.instances:
        by_document.setdefault(instance.doc_id, []).append(instance)
    for index in sorted(by_document):
        yield sorted(by_document[index], key=lambda instance: int(instance.idx))
