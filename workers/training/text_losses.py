"""Losses of text tasks: the cross-entropy of right answers under teacher forcing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.errors import InvalidTask
from workers.evaluation.lm_eval import TaskEvaluator
from workers.evaluation.prompts import Prompts
from workers.evaluation.references import References, Target
from workers.evaluation.text_tasks import TEXT_TASKS
from workers.merging.bank import Bank
from workers.training.losses import minibatches, sample_losses
from workers.training.model import TrainableModel
from workers.types import TaskSpec

__all__ = ["TextLosses"]


class TextLosses:
    """Losses of language models on right answers; implements the interface `task_losses.TaskLosses`.

    `options` are the options of the study's engines, which define prompts.
    """

    def __init__(self, bank: Bank, options: EngineOptions, *, dtype: torch.dtype) -> None:
        self._bank, self._dtype = bank, dtype
        self._references = References(TaskEvaluator(None, Prompts(bank.sources.result_dir, options)))

    def model(
        self,
        *,
        device: torch.device,
        more_devices: Sequence[torch.device] = (),
        recomputes: bool = False,
        like: Recipe | None = None,
    ) -> TrainableModel:
        return TrainableModel(
            self._bank, self._dtype, device=device, more_devices=more_devices, recomputes=recomputes, like=like
        )

    def targets(self, spec: TaskSpec, *, is_entropy: bool = False) -> Sequence[Target]:
        if is_entropy:
            raise InvalidTask(f"task {spec.task}: has no entropy: {TEXT_TASKS.lack_of_entropy(spec)}")
        return self._references.targets(spec)

    def unit(self, spec: TaskSpec) -> float:
        return self._references.unit(spec)

    def size(self, target: Target) -> float:
        return target.size

    def of_completion(self, spec: TaskSpec, position: int, tokens: Sequence[int]) -> Target:
        return self._references.of_completion(spec, position, tokens)

    def minibatches(self, targets: Sequence[Target], max_tokens: int) -> Iterator[list[int]]:
        return minibatches(targets, max_tokens)

    def of_samples(self, model: TrainableModel, targets: Sequence[Target]) -> torch.Tensor:
        return sample_losses(model, targets)
