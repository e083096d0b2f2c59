"""Evaluation tasks that have their own Python functions, each built and scored in a confined process (a sandbox).

The confined process can read the task's files, the installed packages, the libraries of the system, and the task's
data, which the parent process loads and passes on. It can write only below a temporary directory of its own. The module
`confinement` lists all restrictions. The confined process replies in JSON, and the parent process checks each reply.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workers.errors import EngineUnavailable, InvalidTask, MetricFailed, WorkerError
from workers.evaluation.available_confinement import available_confinement
from workers.evaluation.built_tasks import Answers, BuiltTask, Document, PromptSettings, Subtask, permutation
from workers.evaluation.confinement import Confinement, system_paths
from workers.evaluation.execution import Executor
from workers.evaluation.lm_eval_tasks import OUTPUT_TYPES, check_content, is_file, prepare
from workers.evaluation.metric_process import SAMPLE_LIMIT_S, TASK_LIMIT_S, TaskProcess
from workers.evaluation.right_answers import RightAnswer
from workers.evaluation.system_calls import ConfinementUnavailable
from workers.evaluation.task_server import ConfinedStart
from workers.models.remote import local_file
from workers.types import TaskSpec

__all__ = ["ConfinedTask"]

MAX_PROGRAMS = 10_000  # that are executed for one sample
MAX_CPU_S = 60  # processor time that a task may ask for a program
MAX_SAMPLES = 10_000_000  # of a task: what this process orders
MAX_WRITTEN = 2 << 30  # bytes below the temporary directory and to the standard error
BLOCK = 512  # bytes, of stat's st_blocks

# Environment variables that are passed on; others may hold secrets.
PASSED_ON = ("LANG", "LC_ALL", "NLTK_DATA", "PATH", "TZ")


@dataclass(frozen=True)
class _Request:
    """A request to a backend, with the attributes of lm-eval's `Instance` that backends need."""

    request_type: str
    args: tuple[Any, ...]
    doc_id: int
    idx: int
    repeats: int


class ConfinedTask(TaskProcess):
    """Client of a sandboxed process that builds one task and runs the task's own Python functions.

    The process can use only the files and resources that it needs (interface `Confinement`). The class implements the
    interface `built_tasks.TaskCode`. The attribute `built` is the task that `spec` describes. The metric of a sample
    may take `sample_limit_s` seconds, and building the task may take `task_limit_s` seconds. `confinement` replaces the
    sandbox in tests. Raises InvalidTask if the task cannot be built, and if this machine cannot confine a process.
    """

    def __init__(
        self,
        spec: TaskSpec,
        *,
        sample_limit_s: float = SAMPLE_LIMIT_S,
        task_limit_s: float = TASK_LIMIT_S,
        confinement: Callable[..., Confinement] | None = None,
    ) -> None:
        super().__init__(sample_limit_s=sample_limit_s, task_limit_s=task_limit_s)
        self._spec = spec
        try:
            means = confinement or available_confinement()
        except ConfinementUnavailable as error:
            raise self._unavailable(str(error)) from error
        self._prepared = prepare(spec)
        self._directory = Path(tempfile.mkdtemp(prefix="mergesearch-task-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._directory, ignore_errors=True)
        self._data = {key: _streams(data) for key, data in self._prepared.datasets.items()}
        corpora = filter(None, os.environ.get("NLTK_DATA", "").split(os.pathsep))
        self._confinement = means(
            readable=(*system_paths(), *self._prepared.files, *corpora),
            writable=(str(self._directory),),
            listable=self._prepared.directories,
        )
        self._settings: PromptSettings | None = None
        self._executors: dict[int | None, Executor] = {}  # by the processor time of a program
        self.enforced = ""
        try:
            self.built = self._task(self._begin())
        except (EOFError, ConnectionError, TimeoutError) as error:
            how = self._how(error)
            self.close()
            raise InvalidTask(f"task {spec.task!r}: building it {how}") from error
        except WorkerError:
            self.close()
            raise

    def documents(self, settings: PromptSettings) -> tuple[tuple[Document, ...], ...]:
        self._settings = settings
        replies = self._ask(self._question(), "documents")
        try:
            return tuple(tuple(map(_document, each)) for each in replies)
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidTask(f"task {self._spec.task!r}: its prompts are not texts: {error}") from error

    def lack_of_references(self, num_documents: int) -> str | None:
        lack = self._ask(("lack_of_references", num_documents), "lack")
        return None if lack is None else str(lack)

    def begin(self, answers: Answers) -> None:
        """Do nothing: the task's sandboxed process computes the metric of a sample only in the method `values`.

        `answers` are the model's answers to the sample.
        """

    def forget(self) -> None:
        """Do nothing: there are no pending computations to drop, because the method `begin` starts none."""

    def values(self, answers: Sequence[Answers]) -> list[float]:
        """The task's metric for each of several samples, in the order of `answers`; all values are finite.

        `answers` has the model's answers to each sample. The method `documents`, which builds the prompts, must have
        been called before. If the process ends or hangs, it is replaced once by a new process. Raises MetricFailed if
        the metric fails, and EngineUnavailable if the new process, too, ends or hangs while it builds the task.
        """
        found = self._values(self._spec.digest, self.built, answers)
        for value, each in zip(found, answers, strict=True):
            if not math.isfinite(value):
                self._distrust()
                raise MetricFailed(f"task {self._spec.task}, document {each.document}: gave {value}")
        return found

    def close(self) -> None:
        self.stop()
        for executor in self._executors.values():
            executor.close()
        for streams in self._data.values():
            for handle in streams.values():
                os.close(handle)
        self._data = {}
        self._remove()

    def _begin(self) -> Any:
        """Start the sandboxed process, receive its description of each lm-eval task, and return these descriptions."""
        place = str(self._directory)
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": f"{place}/huggingface"}
        spec = self._spec
        if isinstance(spec.task, str) and is_file(spec.task):
            # Its content is checked in this process: the sandboxed process may not read all files of the task.
            spec = replace(spec, task=str(local_file(spec.task).absolute()), access=None, content=None)
        self._start(
            ConfinedStart(self._confinement, spec, self._data, self._prepared.index),
            environment={**environment, **offline, "HOME": place, "TMPDIR": place, "PYTHONDONTWRITEBYTECODE": "1"},
            confinement=self._confinement,
            handles=[handle for streams in self._data.values() for handle in streams.values()],
        )
        self.enforced = str(self._receive("enforced", self._task_limit_s))
        return self._receive("built", self._task_limit_s)

    def _start_again(self) -> None:
        check_content(self._spec)
        try:
            self._begin()
            if self._settings is not None:
                self._send(self._question())
                self._receive("documents", self._task_limit_s)
        except (EOFError, ConnectionError, TimeoutError) as error:
            raise EngineUnavailable(f"building task {self._spec.task!r} again {self._how(error)}") from error

    def _ask(self, message: object, key: str) -> Any:
        """Send the request `message` to the sandboxed process, and return the field `key` of the reply.

        Raises InvalidTask if the process does not reply.
        """
        try:
            self._send(message)
            return self._receive(key, self._task_limit_s)
        except (EOFError, ConnectionError, TimeoutError) as error:
            how = self._how(error)
            self._distrust()
            raise InvalidTask(f"task {self._spec.task!r}: building its prompts {how}") from error

    def _how(self, error: Exception) -> str:
        """Text for an error message that says why the process did not reply: it ended, or reached the time limit.

        `error` is the error of the connection to the process.
        """
        return str(error) if isinstance(error, TimeoutError) else f"ended its process{self._last_words()}"

    def _question(self) -> tuple[object, ...]:
        settings = self._settings
        assert settings is not None
        return "documents", settings.system_prompt, settings.render is not None, settings.tokenizer_name, settings.limit

    def _task(self, facts: Any) -> BuiltTask:
        try:
            subtasks = tuple(map(_subtask, facts))
            sizes = {subtask.name: subtask.num_samples for subtask in subtasks}
            if not subtasks or not 0 < sum(sizes.values()) <= MAX_SAMPLES or len(sizes) < len(subtasks):
                raise ValueError(f"{sum(sizes.values()):,} samples in {len(subtasks)} subtasks")
        except (KeyError, TypeError, ValueError) as error:
            raise InvalidTask(f"task {self._spec.task!r}: cannot be built: its process described {error}") from error
        types = {subtask.output_type for subtask in subtasks}
        return BuiltTask(
            self._spec,
            subtasks,
            permutation(sizes, seed=self._spec.permutation_seed),
            subtasks[0].higher_is_better,
            types.pop() if len(types) == 1 else "mixed",
            code=self,
        )

    def _answer(self, question: Mapping[str, Any]) -> object:
        """Answer a question of the sandboxed process: render chat messages, or execute programs.

        The sandboxed process has no tokenizer and may start no processes, so it asks its parent. The question has the
        key "render", with (messages, whether a prompt for the answer is added), or "execute", with the programs.
        Returns the rendered text, or the outcomes of the programs.
        """
        if "execute" in question:
            return self._execute([_text(program) for program in question["execute"]], question.get("cpu_s"))
        if "render" not in question:
            return super()._answer(question)
        messages, add_generation_prompt = question["render"]
        assert self._settings is not None
        assert self._settings.render is not None
        return self._settings.render(messages, add_generation_prompt=bool(add_generation_prompt))

    def _execute(self, programs: Sequence[str], cpu_s: float | None) -> list[str | None]:
        """Execute programs, each in a sandboxed process of its own with `cpu_s` seconds of processor time.

        Returns the outcome of each program: None if it ran to its end, else the reason why it did not.
        """
        if len(programs) > MAX_PROGRAMS:
            raise ValueError(f"{len(programs):,} programs at once")
        if cpu_s is not None and not 0 < float(cpu_s) <= MAX_CPU_S:
            raise ValueError(f"a limit of {cpu_s} s for a program; at most {MAX_CPU_S} s are accepted")
        key = None if cpu_s is None else math.ceil(float(cpu_s))
        if key not in self._executors:
            self._executors[key] = Executor(cpu_s=key)
        return self._executors[key].run(programs)

    def _check(self) -> None:
        written = os.fstat(self._errors.fileno()).st_size
        for place, _, files in os.walk(self._directory):
            for file in files:
                with contextlib.suppress(OSError):
                    written += os.lstat(os.path.join(place, file)).st_blocks * BLOCK
        if written > MAX_WRITTEN:
            self._distrust()
            raise InvalidTask(f"task {self._spec.task!r}: its code has written more than {MAX_WRITTEN:,} bytes")

    def _error(self, kind: str, message: str, field: str) -> WorkerError:
        if kind == "ConfinementUnavailable":
            return self._unavailable(message)
        return super()._error(kind, message, field)

    def _unavailable(self, why: str) -> InvalidTask:
        return InvalidTask(
            f"task {self._spec.task!r}: names Python functions (!function), which are run only in a confined "
            f"process, and this machine cannot confine one: {why}"
        )


def _streams(data: Any) -> dict[str | None, int]:
    """Write a data set to temporary files as Arrow streams, and return a file descriptor for each split, keyed by name.

    A process that may open no files reads the data through these descriptors. The files are deleted at once, but stay
    readable until the descriptors are closed. `data` is a result of the function `datasets.load_dataset`. For a data
    set without splits, the only key of the result is None. Raises InvalidTask if `data` is neither a data set in memory
    nor a mapping of splits to such data sets, for example if it is streamed.
    """
    import pyarrow
    from datasets import Dataset, DatasetDict

    splits = {None: data} if isinstance(data, Dataset) else data
    if not isinstance(splits, DatasetDict | dict) or not all(isinstance(each, Dataset) for each in splits.values()):
        raise InvalidTask(f"dataset_kwargs: gives {type(data).__name__}, not the data of all splits")
    found = {}
    for name, split in splits.items():
        with tempfile.NamedTemporaryFile(prefix="mergesearch-data-") as file:
            table = split.data.table
            with pyarrow.ipc.new_stream(file, table.schema) as stream:
                stream.write_table(table)
            file.flush()
            found[name] = os.open(file.name, os.O_RDONLY)
    return found


def _subtask(facts: Mapping[str, Any]) -> Subtask:
    names = ("name", "filter", "output_type", "prefix", "delimiter", "template")
    texts = {name: _text(facts[name]) for name in names}
    if texts["output_type"] not in OUTPUT_TYPES:
        raise ValueError(f"the output type {texts['output_type']!r}")
    return Subtask(
        task=None,
        num_samples=int(facts["num_samples"]),
        higher_is_better=bool(facts["higher_is_better"]),
        options=tuple(map(_text, facts["options"])),
        filters=tuple(map(_text, facts["filters"])),
        categories=tuple(map(_text, facts.get("categories", ()))),
        **texts,
    )


def _document(described: Mapping[str, Any]) -> Document:
    doc_id, repeats = int(described["doc_id"]), int(described["repeats"])
    requests = []
    for index, (kind, (context, rest)) in enumerate(described["requests"]):
        second = dict(rest) if kind == "generate_until" else _text(rest)
        requests.append(_Request(_text(kind), (_text(context), second), doc_id, index, repeats))
    if not requests or repeats < 1:
        raise ValueError("a document without requests")
    given = described["right"]
    right = RightAnswer(
        None if given["lack"] is None else _text(given["lack"]),
        tuple(map(_text, given["texts"])),
        tuple(map(_text, given["options"])),
        tuple(map(int, given["right"])),
    )
    return Document(tuple(requests), lambda: right)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} instead of a text")
    return value
