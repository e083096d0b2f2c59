"""Scores the tasks of studies during training, with the same prompts, samples and metrics, by plain transformers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from search_spaces.study.engine import EngineOptions
from workers.engines.transformers.backend import Reference
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.metric_process import MetricProcess
from workers.file_access import FileAccess
from workers.training.finetuning.spec import Evaluation, task_of
from workers.types import Span

__all__ = ["Evaluator"]


class Evaluator:
    """Scores the objectives of a specification's evaluation (`section`) on a model that is being trained.

    `base` is the directory of the base model, whose tokenizer is used. `max_length` is the largest number of tokens in
    a text. With `chat_template`, prompts are formatted with the tokenizer's chat template. `access` limits the files
    that tasks may use, or is None for no limit. Raises InvalidTask if a task cannot be built, and if there is no chat
    template.
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
        access: FileAccess | None = None,
    ) -> None:
        reference = Reference(
            str(base), EngineOptions(max_model_len=max_length, chat_template=chat_template), model=_OnDevice(model)
        )
        self._model = model
        # Ray Train runs a training in a thread; a metric process ends when the thread that started it ends.
        is_main = threading.current_thread() is threading.main_thread()
        self._evaluator = TaskEvaluator(reference, reference.prompts, metrics=None if is_main else MetricProcess())
        self._spans = []
        for spec in section.objectives:
            task = task_of(spec, seed=seed, access=access)
            available = self._evaluator.describe(task).num_samples
            self._spans.append(Span(spec.name, task, 0, min(section.samples, available)))

    def values(self) -> dict[str, float]:
        """Score the model in its present state, and return the mean of each objective over its samples."""
        was_training = self._model.training
        self._model.eval()
        try:
            samples = self._evaluator.score(self._spans).samples
        finally:
            self._model.train(was_training)
        found: dict[str, list[float]] = {}
        for sample in samples:
            found.setdefault(sample.objective, []).append(sample.value)
        return {name: sum(values) / len(values) for name, values in found.items()}


class _OnDevice:
    """Wrapper of a model that moves input tensors from any device to the model's device."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, **inputs: Any) -> Any:
        device = next(self._model.parameters()).device
        return self._model(**{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()})
