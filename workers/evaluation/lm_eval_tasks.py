"""Building of tasks with lm-eval, from a registered name, a YAML file, or an inline JSONL file.

If a task's files name Python functions, the task is built only in a confined process; other processes raise `OwnCode`.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import os
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from search_spaces.study.image_suites import IMAGE_SUITES
from workers.errors import InvalidTask
from workers.evaluation.built_tasks import Answers, BuiltTask, Subtask, permutation
from workers.evaluation.inline_files import InlineRow, read_inline
from workers.evaluation.metrics import results_of
from workers.evaluation.sample_metrics import ACCURACY, LENGTH, METRICS, PER_SAMPLE_FORMS, names_for
from workers.evaluation.task_files import files_digest
from workers.evaluation.task_index import (
    IndexNeeded,
    PlainIndex,
    index_at_hand,
    index_to_send,
    is_shipped,
    manager_of,
    task_index,
    use_index,
)
from workers.evaluation.task_loading import OwnCode, Recording, confined_loading, guarded_loading, recorded_loading
from workers.file_access import FileAccess
from workers.models.remote import local_file
from workers.object_store import is_object_url
from workers.types import TaskSpec

__all__ = [
    "MAX_TOKENS",
    "PASS_AT",
    "LoadedTasks",
    "Prepared",
    "build",
    "check_content",
    "content_hash",
    "inline_rows",
    "inline_template",
    "is_file",
    "prepare",
    "yaml_content",
]

FEWSHOT_SEED = 1234  # lm-eval's default, so that few-shot prompts are those of its command line
EXACT_MATCH, PASS_AT = "exact_match", "pass@"  # the metrics of inline tasks, without and with a program (pass@k)
MEANS = ("mean", "nanmean")
YAML = (".yaml", ".yml")
OUTPUT_TYPES = ("generate_until", "loglikelihood", "multiple_choice")

# The beginning of contents that are digests of all files of a YAML task. Earlier versions stored the sha256 of the YAML
# file alone, without this beginning; their studies keep it.
OF_FILES = "files:"

# The names that a limit of tokens has in lm-eval's generation arguments, the last of those given counts.
MAX_TOKENS = ("max_tokens", "max_new_tokens", "max_gen_toks")

# One of the functions of `task_loading`: makes a context manager of a directory and of the files that may be read.
Loading = Callable[[Path | None, FileAccess | None], AbstractContextManager[None]]


@dataclass(frozen=True)
class Prepared:
    """Files, data and task index that a sandboxed process needs to build a task, in addition to its TaskSpec.

    - `directories`: the directories of the task's files
    - `files`: the files in these directories that the task's code may read
    - `datasets`: the task's data, as `datasets.load_dataset` returned them, keyed by the result of the function
      `task_loading.data_key`
    - `index`: the named tasks (function `task_index`), which other tasks may refer to; None if the task needs none
    """

    directories: tuple[str, ...]
    files: tuple[str, ...]
    datasets: Mapping[str, Any]
    index: PlainIndex | None


class LoadedTasks(dict[str, Any]):
    """Dict of lm-eval's task objects, keyed by name.

    If the study names a group of tasks, the attribute `categories` maps the name of each group within it to the names
    of its tasks.
    """

    def __init__(self, tasks: Mapping[str, Any]) -> None:
        super().__init__(tasks)
        self.categories: dict[str, tuple[str, ...]] = {}


def build(spec: TaskSpec, *, prepared: Prepared | None = None) -> BuiltTask:
    """Build the lm-eval task or tasks that `spec` names, and fix the order of their samples.

    `prepared` has files and data of the task, and is given only in sandboxed processes. Then Python functions that the
    task's files name are run. Without `prepared`, OwnCode is raised for a task with Python functions, which must be
    built in a sandboxed process. Raises InvalidTask if the task is unknown or cannot be scored.
    """
    _quieten()
    if isinstance(spec.task, Mapping):
        name = Path(str(spec.task.get("file"))).stem
        rows = inline_rows(spec)
        tasks = {name: _inline_task(name, rows, spec.task, spec)}
    elif prepared is None:
        tasks = _load(spec, guarded_loading)
    else:
        if prepared.index is not None:
            use_index(prepared.index)
        tasks = _load(spec, lambda directory, _: confined_loading(directory, prepared.datasets))
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
    """Load the data of the task `spec` without running its code, so that a sandboxed process can build the task.

    Raises InvalidTask if files or data cannot be read, or if the study may not read them.
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
        index_to_send(),
    )


def _files_of_task(directory: Path, access: FileAccess | None) -> Iterator[Path]:
    """Yield the files in a task's directory that code of the task may read.

    The result contains the files of the directory itself, and the Python and YAML files in its subdirectories. Hidden
    files are left out. Files that `access` refuses, such as links to files elsewhere, are also left out, except for
    files of shipped tasks.
    """
    access = None if is_shipped(directory) else access
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


def yaml_content(file: str, access: FileAccess | None) -> str:
    """The content of the task of an lm-eval YAML file: a digest of the file and of all files that it reads.

    `file` is a path or URL. `access` limits the files that may be read; None means no limit. The function
    `task_files.files_digest` lists the files. Raises InvalidTask if a file cannot be read.
    """
    if access is not None and (reason := access.refusal(file)):
        raise InvalidTask(reason)
    _quieten()
    place, access = _place_of(file, access)
    try:
        place.open("rb").close()
    except OSError as error:
        raise InvalidTask(f"{file}: cannot be read ({error.strerror})") from error
    return f"{OF_FILES}{files_digest(place, access)}"


def check_content(spec: TaskSpec) -> None:
    """Raise InvalidTask if files of the task `spec` have changed since `spec.content` was computed.

    A task with a registered name, which has no content, is not checked.
    """
    if spec.content is None:
        return
    file = _label(spec)
    if spec.content.startswith(OF_FILES):
        if yaml_content(file, spec.access) != spec.content:
            raise InvalidTask(
                f"{file}: this file or one of the files that it reads has changed since the study was planned; restore "
                "the files or start a new study"
            )
    elif content_hash(file) != spec.content:
        raise InvalidTask(f"{file}: has changed since the study was planned; restore it or start a new study")


def _quieten() -> None:
    """Silence lm-eval's warnings about default settings, and progress bars of lm-eval and the package `datasets`."""
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
    _check_metric_of_inline_task(spec, spec.task, label)
    if spec.filter not in (None, "none"):
        raise InvalidTask(f"task {label}: unknown filter {spec.filter!r}; an inline task has none", "filter")
    if spec.split is not None:
        message = f"task {label}: split {spec.split!r}: an inline file has no splits; use one file for each"
        raise InvalidTask(message, "split")
    if int(spec.task.get("max_tokens", 64)) < 1:
        raise InvalidTask(f"task {label}: max_tokens is {spec.task['max_tokens']}; give at least 1", "task.max_tokens")
    _check_access(spec, spec.task["file"])
    check_content(spec)
    rows = read_inline({**spec.task, "prompt": inline_template(spec)})
    if (spec.num_fewshot or 0) >= len(rows):
        message = f"task {label}: num_fewshot {spec.num_fewshot} needs more than its {len(rows)} samples"
        raise InvalidTask(message, "num_fewshot")
    return rows


def inline_template(spec: TaskSpec) -> str:
    """The Jinja template for the prompts of `spec`, a task that is defined by a JSONL file in the study."""
    assert isinstance(spec.task, Mapping)
    return str(spec.task.get("prompt", "{{prompt}}")) if spec.template is None else spec.template


def _check_metric_of_inline_task(spec: TaskSpec, task: Mapping[str, Any], label: str) -> None:
    if task.get("program") is None:
        if spec.metric not in (EXACT_MATCH, LENGTH):
            message = f"task {label}: unknown metric {spec.metric!r}; an inline task has {EXACT_MATCH} and {LENGTH}"
            raise InvalidTask(message, "metric")
        for key in ("repeats", "temperature", "top_p"):
            if task.get(key) is not None:
                message = f"task {label}: {key} is for tasks with a program; leave it out: decoding is greedy"
                raise InvalidTask(message, f"task.{key}")
        return
    repeats = int(task.get("repeats", 1))
    number = spec.metric.removeprefix(PASS_AT)
    if not (spec.metric.startswith(PASS_AT) and number.isdecimal() and number.isascii() and int(number) >= 1):
        message = f"task {label}: unknown metric {spec.metric!r}; an inline task with a program has pass@1, pass@10 ..."
        raise InvalidTask(message, "metric")
    if int(number) > repeats:
        message = f"task {label}: {spec.metric} needs {number} completions of each prompt or more, repeats is {repeats}"
        raise InvalidTask(message, "task.repeats")
    if repeats > 1 and task.get("temperature") is None:
        message = f"task {label}: repeats is {repeats}, but greedy completions are all equal; give a temperature"
        raise InvalidTask(message, "task.temperature")
    if task.get("top_p") is not None and task.get("temperature") is None:
        message = f"task {label}: top_p {task['top_p']} has no effect without a temperature; leave it out"
        raise InvalidTask(message, "task.top_p")


def _check_access(spec: TaskSpec, file: str | Path) -> None:
    if spec.access is not None and (reason := spec.access.refusal(file)):
        raise InvalidTask(reason)


def _inline_task(name: str, rows: Sequence[InlineRow], task: Mapping[str, Any], spec: TaskSpec) -> Any:
    """Make an lm-eval task from `rows`, the samples of a JSONL file.

    `name` is the name of the lm-eval task, and `spec` is the task of the study. `task` is the study's description of
    the JSONL task, with settings such as `max_tokens`. The metric "exact_match" compares a completion with the whole
    answer, apart from white space at their ends.
    """
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask

    temperature = task.get("temperature")
    columns = {"prompt": [row.prompt for row in rows], "answer": [row.answer for row in rows]}

    def exact_match(doc: Mapping[str, str], results: Sequence[str]) -> dict[str, float]:
        answer = results[0].strip()
        return {EXACT_MATCH: float(answer == doc["answer"].strip()), LENGTH: float(len(answer))}

    # Functions, because lm-eval would evaluate a template's answer that looks like a list.
    return ConfigurableTask(
        config={
            "task": name,
            "custom_dataset": lambda **_: {"test": Dataset.from_dict(columns)},
            "test_split": "test",
            "fewshot_split": "test",
            "num_fewshot": spec.num_fewshot or 0,
            "output_type": "generate_until",
            "doc_to_text": lambda doc: doc["prompt"],
            "doc_to_target": lambda doc: doc["answer"],
            "target_delimiter": "",
            "fewshot_delimiter": "\n",
            "process_results": exact_match,
            "metric_list": [
                {"metric": metric, "aggregation": "mean", "higher_is_better": True}
                for metric in (EXACT_MATCH, spec.metric)
            ],
            "generation_kwargs": {
                "until": list(task.get("until", ("\n",))),
                "max_gen_toks": int(task.get("max_tokens", 64)),
                **({"do_sample": False} if temperature is None else {"do_sample": True, "temperature": temperature}),
                **({} if task.get("top_p") is None else {"top_p": float(task["top_p"])}),
            },
            "repeats": int(task.get("repeats", 1)),
        }
    )


# lm-eval's own tasks


def _load(spec: TaskSpec, loading: Loading) -> dict[str, Any]:
    """Load the tasks of `spec` with lm-eval, from a YAML file or by a registered name.

    `loading` is one of the context managers of the module `task_loading`; it limits the files that lm-eval may read.
    Returns lm-eval's task objects, keyed by name.
    """
    assert isinstance(spec.task, str)
    return _from_yaml(spec.task, spec, loading) if is_file(spec.task) else _from_name(spec.task, loading)


def _from_name(name: str, loading: Loading) -> dict[str, Any]:
    index = task_index()
    if name not in index:
        nearest = difflib.get_close_matches(name, sorted({*index, *IMAGE_SUITES}), n=3, cutoff=0.5)
        raise InvalidTask(
            f"task {name!r}: lm-eval knows no such task"
            + (f"; nearest are {', '.join(nearest)}" if nearest else "; `lm-eval ls tasks` lists them")
        )
    with loading(None, None):
        return _loaded(manager_of(index), name, label=name)


def _from_yaml(name: str, spec: TaskSpec, loading: Loading) -> dict[str, Any]:
    _check_access(spec, name)
    file, access = _place_of(name, spec.access)
    if not file.is_file():
        raise InvalidTask(f"task {str(file)!r}: no such file")
    check_content(spec)
    try:
        with loading(file.parent, access):  # data files are relative to the task file, not to the process's directory
            return _load_yaml(file)
    except IndexNeeded:
        task_index()
    with loading(file.parent, access):
        return _load_yaml(file)


def _place_of(name: str, access: FileAccess | None) -> tuple[Path, FileAccess | None]:
    """The path on this machine of the YAML file `name`, a path or URL, and the files that its task may read.

    For a URL, the folder of its download may be read besides the files that `access` allows. Python functions in it are
    not trusted.
    """
    file = local_file(name).absolute()
    if is_object_url(name):
        access = (access or FileAccess((os.sep,))).allowing([str(file.parent)])
    return file, access


def _load_yaml(file: Path) -> dict[str, Any]:
    from lm_eval.tasks import _yaml_loader
    from lm_eval.tasks._index import TaskIndex

    try:
        config = _yaml_loader.load_yaml(file, resolve_func=False)
    except InvalidTask as error:
        raise InvalidTask(f"{file}: {error}") from error
    except Exception as error:  # YAML of any origin, and its includes
        raise InvalidTask(f"{file}: not an lm-eval task: {error}") from error
    if not isinstance(config, dict) or not ({"task", "group"} & set(config)):
        raise InvalidTask(f"{file}: not an lm-eval task: neither `task` nor `group` in it")
    index = TaskIndex.build([file.parent])
    members = config["task"] if isinstance(config.get("task"), list) else []
    names = [each.get("task", each.get("group")) if isinstance(each, Mapping) else each for each in members]
    if any(isinstance(name, str) and name not in index for name in names):
        index = {**index_at_hand(), **index}
    manager = manager_of(index)
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
        raise InvalidTask(f"task {label!r}: cannot be built: {reason}") from error
    tasks = LoadedTasks(found["tasks"])
    for group in found["groups"].values():
        for inner in group.get_all_groups():
            tasks.categories |= {inner.name: tuple(task.task_name for task in inner.get_all_tasks())}
    return tasks


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
    is_inline = isinstance(spec.task, Mapping)
    if spec.template is not None and not is_inline:
        _use_template(task, spec.template, where)
    if spec.max_tokens is not None:  # lm-eval knows the limit by several names, of which the task may have any
        _set_generation(task, MAX_TOKENS, "max_gen_toks", spec.max_tokens, field="max_tokens", where=where)
    if spec.until is not None:
        _set_generation(task, ("until",), "until", list(spec.until), field="until", where=where)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    num_samples = len(task.eval_docs)
    if num_samples == 0:
        raise InvalidTask(f"{where}: holds no samples")
    subtask = Subtask(
        name=name,
        task=task,
        filter=_filter(task, spec, where),
        num_samples=num_samples,
        output_type=str(task.OUTPUT_TYPE),
        higher_is_better=bool(task.higher_is_better().get(spec.metric, True)),
        prefix=str(task.config.gen_prefix or ""),
        delimiter=str(task.config.target_delimiter),
        template=inline_template(spec) if is_inline else _template_of(task),
        options=_fixed_options(task),
        filters=tuple(str(ensemble.name) for ensemble in task._filters),
    )
    _check_value(subtask, spec, where)
    return subtask


def _check_metric(task: Any, spec: TaskSpec, where: str) -> None:
    """Raise InvalidTask if the metric of `spec` is unknown to `task`, or is not a mean over samples.

    `where` begins the message. If the metric is the accuracy of a multiple choice and `task` does not list it, the
    accuracy is added to `task`.
    """
    from lm_eval.api.registry import AGGREGATION_REGISTRY

    aggregations: Mapping[str, Any] = task.aggregation()
    metrics = names_for(task.OUTPUT_TYPE)
    if spec.metric not in aggregations:
        if spec.metric in METRICS and spec.metric in metrics:
            return
        if spec.metric == ACCURACY and spec.metric in metrics and task.config.process_results is None:
            _add_accuracy(task)
            return
        others = [name for name in metrics if name not in aggregations]
        message = f"{where}: unknown metric {spec.metric!r}; it has {', '.join(sorted(aggregations))}"
        raise InvalidTask(message + (f", and every such task {', '.join(others)}" if others else ""), "metric")
    function = aggregations[spec.metric]
    names = {registered: name for name, registered in AGGREGATION_REGISTRY.items()}
    name = names.get(function, getattr(function, "__name__", str(function)))
    if name not in MEANS:
        raise InvalidTask(
            f"{where}: metric {spec.metric!r} is aggregated by {name}, not by the mean over samples, so that a part "
            f"of the data does not estimate it; {_instead(spec.metric, metrics)}",
            "metric",
        )


def _check_value(subtask: Subtask, spec: TaskSpec, where: str) -> None:
    """Raise InvalidTask if the metric of `spec` gives no number for a sample.

    `subtask` is one of the task's lm-eval tasks. Some metrics give values that only their own aggregation can use, so
    that they have no mean. The metric is computed once, on a placeholder answer to the first document. `where` begins
    the message.
    """
    task = subtask.task
    if task.config.process_results is not None or any(
        callable(each["metric"]) for each in task.config.metric_list or ()
    ):
        return
    document = task.eval_docs[0]
    try:
        answers = Answers(0, 0, _made_up(task, document))
        value = results_of(subtask, document, answers, metric=spec.metric)[spec.metric]
    except Exception:  # a made-up answer may be none that the metric expects
        return
    try:
        float(value)
    except (TypeError, ValueError) as error:
        raise InvalidTask(
            f"{where}: metric {spec.metric!r} gives {reprlib.repr(value)} for a sample, not a number, so that it has "
            f"no mean, whatever `aggregation` says; {_instead(spec.metric, names_for(task.OUTPUT_TYPE))}",
            "metric",
        ) from error


def _made_up(task: Any, document: Any) -> tuple[tuple[Any, ...], ...]:
    """Placeholder answers to the requests of a document of `task`, for trying a metric on them.

    The result contains a tuple of answers for each request. The requests are not built, because that would draw
    few-shot examples.
    """
    if task.OUTPUT_TYPE == "generate_until":
        return (("",),)
    if task.OUTPUT_TYPE == "loglikelihood":
        return (((-1.0, False),),)
    count = len(task.doc_to_choice(document)) * (2 if "acc_mutual_info" in task.aggregation() else 1)
    return (((-1.0, False),),) * count


def _instead(metric: str, metrics: Sequence[str]) -> str:
    form = PER_SAMPLE_FORMS.get(metric)
    return f"use {form} instead" if form in metrics else "choose a metric that is a mean"


def _add_accuracy(task: Any) -> None:
    from lm_eval.api.registry import get_aggregation, get_metric

    task._metric_fn_list[ACCURACY] = get_metric(ACCURACY)
    task._metric_fn_kwargs[ACCURACY] = {}
    task._aggregation_list[ACCURACY] = get_aggregation("mean")
    task._higher_is_better[ACCURACY] = True


def _filter(task: Any, spec: TaskSpec, where: str) -> str:
    names = [str(ensemble.name) for ensemble in task._filters]
    if spec.filter is None:
        return names[0]
    if spec.filter not in names:
        raise InvalidTask(f"{where}: unknown filter {spec.filter!r}; it has {', '.join(names)}", "filter")
    return spec.filter


def _set_generation(
    task: Any, old: Sequence[str], name: str, value: int | list[str], *, field: str, where: str
) -> None:
    """Set one of a task's generation arguments (`generation_kwargs`), such as the limit of tokens.

    - `old`: the names of arguments that are removed
    - `name`, `value`: the argument that is set
    - `field`: the option of the study file that sets it, for messages
    - `where`: the beginning of messages

    Raises InvalidTask if the task generates no text.
    """
    if task.OUTPUT_TYPE != "generate_until":
        message = f"{where}: {field} {value}: the task scores options and generates no text; leave it out"
        raise InvalidTask(message, field)
    arguments = {key: given for key, given in task.get_config("generation_kwargs").items() if key not in old}
    task.set_config("generation_kwargs", {**arguments, name: value})


def _template_of(task: Any) -> str:
    """The Jinja template of a task's prompts; "" if the prompts come from a function or a column of the data."""
    text = task.config.doc_to_text
    return text if isinstance(text, str) and text not in getattr(task, "features", ()) else ""


def _use_template(task: Any, template: str, where: str) -> None:
    """Replace the template of a task's prompts; few-shot examples that use the same template get the new one as well.

    Raises InvalidTask if the task's prompts come from no template; `where` is the beginning of the message.
    """
    if not _template_of(task):
        raise InvalidTask(f"{where}: its prompts come from no template, and none can be put in place of it")
    if task.fewshot_cfg.doc_to_text == task.config.doc_to_text:
        task.fewshot_cfg.doc_to_text = template
    task.set_config("doc_to_text", template)


def _fixed_options(task: Any) -> tuple[str, ...]:
    options = task.config.doc_to_choice
    if isinstance(options, Mapping):
        options = list(options.values())
    return tuple(map(str, options)) if isinstance(options, list) else ()


def _use_split(task: Any, split: str, where: str) -> None:
    splits = sorted(task.dataset) if isinstance(task.dataset, Mapping) else []
    if split not in splits:
        raise InvalidTask(f"{where}: no split {split!r}; its data has {', '.join(splits) or 'none'}", "split")
    task.set_config("test_split", split)
    task.task_docs = task.eval_docs


def is_file(task: str) -> bool:
    """Whether `task` is the path of a YAML file, not the name of a registered task."""
    return Path(task).suffix in YAML


def _label(spec: TaskSpec) -> str:
    return str(spec.task.get("file")) if isinstance(spec.task, Mapping) else spec.task
