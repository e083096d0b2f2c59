"""Application of lm-eval's filters and metrics to the answers to one sample.

Metrics may set timers (SIGALRM), which Python allows only in the main thread of a process. In other threads they raise,
or score 0 without a message. A replica scores in another thread. Therefore it computes metrics in a separate process
(class `metric_process.MetricProcess`).
"""

from __future__ import annotations

import math
import reprlib
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from workers.errors import MetricFailed
from workers.evaluation.built_tasks import Answers, BuiltTask, Subtask
from workers.evaluation.right_answers import right_answer
from workers.evaluation.sample_metrics import METRICS

__all__ = ["Documents", "LocalMetrics", "Metrics", "failure", "results_of"]

# The documents of each subtask, by lm-eval's `doc_id`.
Documents = tuple[Mapping[int, Any], ...]


class Metrics(Protocol):
    """Interface for computing a task's metric for samples.

    Before values are requested, the task must be passed to the method `open`. Afterwards it is named by the digest of
    its TaskSpec.
    """

    def open(self, task: BuiltTask, documents: Documents) -> None: ...

    def close(self, digest: str) -> None: ...

    def values(self, digest: str, answers: Sequence[Answers]) -> list[float]:
        """A task's metric for each of several samples, in the order of `answers`; all values are finite.

        `digest` names the task, and `answers` has the model's answers to each sample. Raises MetricFailed if the metric
        fails.
        """
        ...


class LocalMetrics:
    """Metrics of tasks, computed in the calling process, which must have built the tasks itself.

    A task with its own code is refused, except in the sandboxed process that is made for this task. The methods must be
    called in the main thread, because metrics may set timers.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[BuiltTask, Documents]] = {}

    def open(self, task: BuiltTask, documents: Documents) -> None:
        if task.code is not None:
            raise RuntimeError(f"task {task.spec.task!r} runs code of its own: its values come from its own process")
        self._tasks[task.spec.digest] = task, documents

    def close(self, digest: str) -> None:
        self._tasks.pop(digest, None)

    def values(self, digest: str, answers: Sequence[Answers]) -> list[float]:
        return [self.value(digest, each) for each in answers]

    def value(self, digest: str, answers: Answers) -> float:
        """A task's metric for one sample; `digest` names the task, and `answers` are the model's answers.

        Raises MetricFailed for an error of the metric or of the task's filter, which extracts the answer from a model's
        text, and for a result that is not a finite number.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("metrics may set timers, which only a main thread can: use MetricProcess")
        task, documents = self._tasks[digest]
        subtask, metric = task.subtasks[answers.subtask], task.spec.metric
        try:
            found = results_of(subtask, documents[answers.subtask][answers.document], answers, metric=metric)
            value = float(found[metric]) if metric in found else None
        except (Exception, SystemExit) as error:  # a metric is code of any origin: it may raise anything
            what = f"raised {type(error).__name__}: {error}; the answer was {reprlib.repr(answers.responses)}"
            raise failure(task, answers, what) from error
        if value is None:
            raise failure(task, answers, f"is not among what the task gave: {', '.join(sorted(found)) or 'nothing'}")
        if not math.isfinite(value):
            raise failure(task, answers, f"gave {value}, not a finite number")
        return value


def failure(task: BuiltTask, answers: Answers, what: str) -> MetricFailed:
    """Build the MetricFailed error for one sample, whose message names the task, the metric and the document.

    `answers` are the model's answers to the sample. `what` describes the failure.
    """
    name = task.subtasks[answers.subtask].name
    return MetricFailed(f"task {name}, document {answers.document}: metric {task.spec.metric!r} {what}")


def results_of(subtask: Subtask, document: Any, answers: Answers, *, metric: str) -> Mapping[str, Any]:
    """Apply a filter and metrics to the answers to one document, and return the results by metric.

    `subtask` is the lm-eval task of the document. Its filter extracts the answer from a model's text. Usually the
    result has each of the metrics of `subtask`. If `metric` is a metric of this project (module `sample_metrics`) that
    `subtask` does not have, the result has only `metric`.
    """
    from lm_eval.api.instance import Instance

    instances = [
        Instance(subtask.output_type, document, (), index, resps=list(responses))
        for index, responses in enumerate(answers.responses)
    ]
    ensemble = next(ensemble for ensemble in subtask.task._filters if ensemble.name == subtask.filter)
    ensemble.apply(instances)
    filtered = [instance.filtered_resps[subtask.filter] for instance in instances]
    if metric in METRICS and metric not in subtask.task.aggregation():
        right = right_answer(subtask.task, document)
        if right.lack is not None:
            raise ValueError(right.lack)
        return {metric: METRICS[metric](str(subtask.task.doc_to_text(document)), right.texts, _text(filtered[0]))}
    results: Mapping[str, Any] = subtask.task.process_results(document, filtered)
    config = subtask.task.config
    if metric not in results and len(results) == len(config.metric_list or ()) == 1 and config.process_results is None:
        return {metric: next(iter(results.values()))}  # a function may name its value itself, as "pass@1"
    return results


def _text(answer: Any) -> str:
    """Text of `answer`, the result of lm-eval's filter for a completion; if the result is a list, its first text."""
    return str(answer[0]) if isinstance(answer, list) else str(answer)
