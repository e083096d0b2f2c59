"""Scoring of evaluation tasks during training, in transformers, with the prompts and metrics that studies use."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from search_spaces.study.engine import EngineOptions
from workers.engines.transformers.backend import Reference
from workers.errors import InvalidTask, TrainingFailed
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.metric_process import MetricProcess
from workers.evaluation.prompts import Generation
from workers.file_access import FileAccess
from workers.training.finetuning.sharding import ShardedModel
from workers.training.finetuning.spec import Evaluation, task_of
from workers.types import Span, TaskSpec

__all__ = ["Evaluator", "TaskScorer", "check_greedy"]


def check_greedy(task: TaskSpec, evaluator: TaskEvaluator, *, samples: int) -> None:
    """Check that the first `samples` samples of a task are completed greedily, as transformers does in a training.

    Raises InvalidTask if completions are drawn at a temperature above 0, or if the task cannot be built.
    """
    for position in range(samples):
        for request in evaluator.requests(task, position):
            if isinstance(request, Generation) and request.temperature > 0:
                raise InvalidTask(
                    f"samples completions at the temperature {request.temperature:g}; evaluations during a training "
                    "complete prompts greedily; give a task without a temperature",
                    "task" if isinstance(task.task, str) else "task.temperature",
                )


class TaskScorer:
    """Scorer of tasks on a transformers model in this process, whose weights may change between calls.

    `directory` has the tokenizer. `options` say how prompts are made. Raises InvalidTask if `options` require a chat
    template and the tokenizer has none.
    """

    def __init__(self, directory: str, options: EngineOptions, model: Any) -> None:
        # Ranks cannot try a smaller batch together if only one of them runs out of memory.
        halves = not isinstance(model, ShardedModel)
        reference = Reference(directory, options, model=_OnDevice(model), halves_batches=halves)
        # Ray Train runs a training in a thread; a metric process ends when the thread that started it ends.
        is_main = threading.current_thread() is threading.main_thread()
        self._evaluator = TaskEvaluator(reference, reference.prompts, metrics=None if is_main else MetricProcess())

    def num_samples(self, task: TaskSpec) -> int:
        """The number of samples of a task. Raises InvalidTask if the task cannot be built."""
        return self._evaluator.describe(task).num_samples

    def values(self, spans: Sequence[Span]) -> dict[str, float]:
        """Mean metric of each objective over the samples in `spans`.

        A span names an objective, its task, and a range of the task's samples.
        """
        found: dict[str, list[float]] = {}
        for sample in self._evaluator.score(spans).samples:
            found.setdefault(sample.objective, []).append(sample.value)
        return {name: sum(values) / len(values) for name, values in found.items()}


class Evaluator:
    """Scorer of a fine-tuning's evaluation objectives on the model in training.

    - `section`: the section `evaluation` of the specification
    - `base`: the directory of the base model, whose tokenizer is used
    - `model`: the model in training
    - `max_length`: the largest number of tokens in a text
    - `seed`: determines the order of the tasks' samples
    - `chat_template`: whether prompts are formatted with the tokenizer's chat template
    - `called`: a callable that is called in place of `model`, such as a linearization (a model that is linear in its
      weights), or a wrapper that computes on all ranks if the model has shards; None if `model` itself is called
    - `access`: limits the files that tasks may use; None means no limit

    Raises InvalidTask if a task cannot be built, or if the chat template is missing.
    """

    def __init__(
        self,
        section: Evaluation,
        base: Path,
        model: Any,
        *,
        max_length: int,
        seed: int,
        chat_template: bool = False,
        called: Any = None,
        access: FileAccess | None = None,
    ) -> None:
        options = EngineOptions(max_model_len=max_length, chat_template=chat_template)
        self._model = model
        self._scorer = TaskScorer(str(base), options, model if called is None else called)
        self._spans = []
        for spec in section.objectives:
            task = task_of(spec, seed=seed, access=access)
            self._spans.append(Span(spec.name, task, 0, min(section.samples, self._scorer.num_samples(task))))

    def values(self) -> dict[str, float]:
        """Score the model with its current weights, and return the mean metric of each objective.

        Raises TrainingFailed if a GPU has too little memory.
        """
        was_training = self._model.training
        self._model.eval()
        try:
            return self._scorer.values(self._spans)
        except torch.OutOfMemoryError as error:
            raise TrainingFailed(
                f"evaluation: the GPU ran out of memory ({str(error).splitlines()[0]}); shorter prompts and a smaller "
                "max_tokens of the tasks take less; the training continues from its last checkpoint, also with "
                "another evaluation or without one"
            ) from error
        finally:
            self._model.train(was_training)


class _OnDevice:
    """Wrapper of a model that moves its input tensors to the model's device.

    `forward` is the method of the transformers model that computes the outputs, whose signature has the options of
    calls. It is None if another object computes them, such as a linearization.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        causal = model.module if isinstance(model, ShardedModel) else model
        causal = causal.get_base_model() if hasattr(causal, "get_base_model") else causal
        self.forward = getattr(causal, "forward", None)

    def __call__(self, **inputs: Any) -> Any:
        device = next(self._model.parameters()).device
        return self._model(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})
