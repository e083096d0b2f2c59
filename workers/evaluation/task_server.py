"""Main function of a separate process, confined or not, that builds tasks and computes their metrics.

The parent process is trusted and sends pickled messages. This process sends JSON, because its messages may have been
written by the code of a task, which is not trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from workers.errors import InvalidTask, MetricFailed, WorkerError
from workers.evaluation.built_tasks import (
    Answers,
    BuiltTask,
    Document,
    PromptSettings,
    documents_of,
    lack_of_references,
)
from workers.evaluation.channel import Channel
from workers.evaluation.confinement import Confinement
from workers.evaluation.execution import pass_at_k
from workers.evaluation.lm_eval_tasks import Prepared, build
from workers.evaluation.metrics import Documents, LocalMetrics
from workers.evaluation.system_calls import PR_SET_PDEATHSIG, ConfinementUnavailable
from workers.evaluation.task_index import PlainIndex
from workers.types import TaskSpec

__all__ = ["ConfinedStart", "serve"]

# Values that are sent together: waking the other process for each takes longer than most metrics.
SEND_EVERY_S = 0.1


@dataclass(frozen=True)
class ConfinedStart:
    """First message to a process that will run code of a task.

    - `confinement`: the sandbox to which the process confines itself
    - `spec`: the task
    - `data`: file descriptors of the task's data as Arrow streams, keyed by the result of the function
      `task_loading.data_key` and the split; the split is None for data without splits
    - `index`: the named tasks that the task may refer to, or None
    """

    confinement: Confinement
    spec: TaskSpec
    data: Mapping[str, Mapping[str | None, int]]
    index: PlainIndex | None


def serve() -> None:
    """Answer the parent's requests until the other end of the connection closes.

    The only command line argument is the connection's file descriptor. The first message is a ConfinedStart, which has
    a task with its data and the sandbox for the task's code, or None for a process that runs no code of tasks. Each
    further message is a request: a tuple of the name of a method of this module's server class, such as "values", and
    its arguments. Every reply has one key. If the request failed, the key is "error". An error of an unexpected kind
    ends the process.
    """
    _prepare_signals()
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(EOFError, ConnectionError):
        server = _Server(channel)
        server.start(pickle.loads(channel.receive()))
        while True:
            method, *arguments = pickle.loads(channel.receive())
            try:
                getattr(server, method)(*arguments)
            except WorkerError as error:
                server.reply(error=_described(error))


class _Server:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._local = LocalMetrics()
        self._refused: dict[str, InvalidTask] = {}
        self._task: BuiltTask | None = None  # a task with Python code

    def reply(self, **message: Any) -> None:
        try:
            text = json.dumps(message)
        except (TypeError, ValueError) as error:  # the task's code returned the message
            raise InvalidTask(f"it has {error}; expected text, numbers, lists and dicts") from error
        self._channel.send(text.encode())

    def start(self, start: ConfinedStart | None) -> None:
        if start is None:
            importlib.import_module("lm_eval.tasks")  # takes seconds, while the engine starts
            return
        try:
            enforced = start.confinement.apply()
        except ConfinementUnavailable as error:
            self.reply(error=["ConfinementUnavailable", str(error), ""])
            return
        self.reply(enforced=enforced)
        sys.modules["evaluate"] = self._evaluate()
        try:
            data = {key: _loaded(splits) for key, splits in start.data.items()}
            self._task = build(start.spec, prepared=Prepared((), (), data, start.index))
        except InvalidTask as error:
            self.reply(error=_described(error))
        except Exception as error:  # a task is code and data of any origin
            self.reply(error=["InvalidTask", f"cannot be built: {type(error).__name__}: {error}", "task"])
        else:
            self.reply(built=[_facts(subtask) for subtask in self._task.subtasks])

    def open(self, spec: TaskSpec, documents: Documents) -> None:
        """Build the task `spec`, which has no code of its own, so that its values can be requested later.

        `documents` are the task's documents (lm-eval's samples). An error is reported when values of the task are first
        requested.
        """
        self._refused.pop(spec.digest, None)
        try:
            self._local.open(build(spec), documents)
        except InvalidTask as error:
            self._refused[spec.digest] = error
        except Exception as error:  # a task is data of any origin
            self._refused[spec.digest] = InvalidTask(
                f"task {spec.task!r}: cannot be built: {type(error).__name__}: {error}"
            )

    def close(self, digest: str) -> None:
        self._local.close(digest)

    def documents(self, system_prompt: str | None, has_template: bool, tokenizer: str, limit: int | None) -> None:
        """Build the requests of all documents of this process's task, and send the requests as the reply.

        A document is lm-eval's term for a sample. A request is a prompt to complete or to score. `has_template` says
        whether prompts are rendered by a chat template; the parent process renders them. `system_prompt` may be None,
        `tokenizer` is the tokenizer's name, and `limit` is the number of documents; None means all documents.
        """
        task = self._built
        settings = PromptSettings(system_prompt, self._render if has_template else None, tokenizer, limit)
        try:
            found = documents_of(task, settings)
            contents = tuple({each.instances[0].doc_id: each.instances[0].doc for each in each_of} for each_of in found)
            described = [[_document(each) for each in each_of] for each_of in found]
        except InvalidTask:
            raise
        except Exception as error:
            raise InvalidTask(f"its prompts cannot be built: {type(error).__name__}: {error}") from error
        self._local.open(task, contents)
        self.reply(documents=described)

    def lack_of_references(self, num_documents: int) -> None:
        self.reply(lack=lack_of_references(self._built, num_documents))

    def values(self, digest: str, answers: Sequence[Answers], one_by_one: bool) -> None:
        """Compute a task's metric for each of several samples, and send the values in one or more replies.

        `answers` has the model's answers to each sample. A first reply, {"ready": true}, says that the task is built.
        With `one_by_one`, each value is a separate reply. `digest` names the task; it is ignored in a process that runs
        code of one task.
        """
        if self._task is not None:
            digest = self._task.spec.digest
        if digest in self._refused:
            raise self._refused[digest]
        self.reply(ready=True)
        values: list[float] = []
        sent_at = time.monotonic()
        for each in answers:
            try:
                values.append(self._local.value(digest, each))
            except WorkerError:
                self.reply(values=values)
                raise
            finally:
                signal.alarm(0)  # a timer that a metric has left behind
            if one_by_one or time.monotonic() - sent_at > SEND_EVERY_S:
                self.reply(values=values)
                values, sent_at = [], time.monotonic()
        if values:
            self.reply(values=values)

    @property
    def _built(self) -> BuiltTask:
        assert self._task is not None
        return self._task

    def _evaluate(self) -> ModuleType:
        """Make a module that replaces the package `evaluate` and has only the metric "code_eval".

        The package itself would download metrics as code from the hub, and this process does not run such code.
        """

        def load(name: str, *_: Any, **__: Any) -> Any:
            if name != "code_eval":
                raise InvalidTask(
                    f"metric {name!r} of the package evaluate is code of the hub, which is not run", "metric"
                )
            return SimpleNamespace(compute=self._code_eval)

        module = ModuleType("evaluate")
        module.__dict__["load"] = load
        return module

    def _code_eval(
        self,
        *,
        predictions: Sequence[Sequence[str]],
        references: Sequence[str],
        k: Sequence[int] = (1,),
        timeout: float | None = None,
        **_: Any,
    ) -> tuple[dict[str, float], dict[int, list[str | None]]]:
        """Compute the metric "code_eval" (pass@k) by executing each prediction with the tests of its reference.

        - `predictions`: for each reference, the completions
        - `references`: the tests, as Python code that is appended to a completion
        - `k`: the values of k for which pass@k is computed
        - `timeout`: the processor time of a program, in seconds (by default the constant `execution.CPU_S`)

        Returns the mean of pass@k over the references, keyed by name, and for each reference the outcomes of its
        programs. An outcome is None for a program that ran to its end, else a reason.
        """
        programs = [f"{each}\n{test}" for tries, test in zip(predictions, references, strict=True) for each in tries]
        self.reply(execute=programs, cpu_s=timeout)
        reasons = iter(pickle.loads(self._channel.receive()))
        outcomes = {index: [next(reasons) for _ in tries] for index, tries in enumerate(predictions)}
        return {
            f"pass@{each}": sum(pass_at_k(len(found), found.count(None), each) for found in outcomes.values())
            / len(outcomes)
            for each in k
            if all(len(found) >= each for found in outcomes.values())
        }, outcomes

    def _render(self, messages: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        self.reply(render=[list(map(dict, messages)), bool(add_generation_prompt)])
        return str(pickle.loads(self._channel.receive()))


def _prepare_signals() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when this process ends
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # the parent's thread may block signals that metrics wait for
    if sys.platform == "linux":  # so that the process also ends when the parent is killed while a metric hangs
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    logging.getLogger("lm_eval").setLevel(logging.ERROR)


def _loaded(splits: Mapping[str | None, int]) -> Any:
    """Map Arrow streams into memory as the data set that the function `datasets.load_dataset` would return.

    `splits` has the file descriptor of each split's stream; the split is None for data without splits.
    """
    import pyarrow
    from datasets import Dataset, DatasetDict, DatasetInfo

    def mapped(handle: int) -> Any:
        buffer = pyarrow.py_buffer(mmap.mmap(handle, 0, access=mmap.ACCESS_READ))
        os.close(handle)
        return Dataset.from_buffer(buffer, info=DatasetInfo())

    found = {name: mapped(handle) for name, handle in splits.items()}
    return found[None] if None in found else DatasetDict(found)


def _facts(subtask: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(subtask).items() if name != "task"}


def _document(document: Document) -> dict[str, Any]:
    first = document.instances[0]
    return {
        "doc_id": first.doc_id,
        "repeats": first.repeats,
        "requests": [[each.request_type, list(each.args)] for each in document.instances],
        "right": asdict(document.right()),
    }


def _described(error: WorkerError) -> list[str]:
    kind = "MetricFailed" if isinstance(error, MetricFailed) else "InvalidTask"
    return [kind, str(error), getattr(error, "field", "")]
