"""Losses and accuracies of merges of trained image experts, on each expert's tasks with this expert's head.

This module does for image classifiers the work of the module `merge_losses` for text models. The loss is the
cross-entropy of the right class, in nats per image. The CPU computes, because engines may use the GPUs of this machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from search_spaces.recipe import Merge, Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.images.engine import ImageEngine
from workers.engines.images.pixels import Pixels
from workers.engines.images.scoring import BATCH, ImageEvaluator
from workers.errors import InvalidTask
from workers.models.family import open_family
from workers.training.finetuning.modality import MergeReport
from workers.types import TaskSpec

__all__ = ["ImageMergeLosses"]


class ImageMergeLosses:
    """Measurement of losses and accuracies of merges of trained image experts, on each expert's tasks.

    The first `samples` images of each task are for choosing coefficients, and the next `samples` images are for
    reporting merges. If a task has fewer than twice `samples` images, each part has half of the images. Raises
    InvalidModel if a model cannot be used, and InvalidTask if a task cannot be used or has a single image.

    - `base`: the directory of the base model
    - `directories`: the directory of each expert, keyed by alias
    - `tasks`: the tasks of each expert, keyed by alias
    """

    def __init__(
        self, base: Path, directories: Mapping[str, Path], tasks: Mapping[str, Sequence[TaskSpec]], *, samples: int
    ) -> None:
        self._engine = ImageEngine(open_family(base, directories), EngineOptions(dtype="float32"), device="cpu")
        sources = self._engine.sources
        self._evaluator = ImageEvaluator(
            sources, self._engine.features, Pixels(sources.result_dir), device=self._engine.device
        )
        self._fingerprints = dict(self._engine.base_recipe.models)
        self._fingerprints |= {model.alias: model.fingerprint for model in self._engine.family.models}
        self._tasks = tasks
        self._middle = {task.digest: self._half(task, samples) for own in tasks.values() for task in own}
        self._samples = samples

    def of(self, merge: Merge) -> dict[str, float]:
        """Measure a merge's mean loss on each merged expert's tasks, on the images for choosing coefficients.

        The losses are keyed by the expert's alias. Each task has some images for choosing coefficients, and other
        images for reports.
        """
        return {alias: loss for alias, (loss, _) in self._measured(merge, is_reported=False).items()}

    def report(self, merge: Merge) -> MergeReport:
        """Measure a merge's mean loss and accuracy on each merged expert's tasks, on the images for reports.

        The images for reports are not used to choose coefficients. Losses and accuracies are keyed by the expert's
        alias.
        """
        found = self._measured(merge, is_reported=True)
        losses = {alias: loss for alias, (loss, _) in found.items()}
        return MergeReport(losses, {alias: value for alias, (_, value) in found.items()})

    def _half(self, task: TaskSpec, samples: int) -> int:
        """Number of images of a task for choosing coefficients: `samples`, but at most half of the task's images."""
        count = len(self._evaluator.task(task).task.order)
        if count < 2:
            where = self._evaluator.task(task).task.images.where
            raise InvalidTask(
                f"{where}: has {count} image; expected at least 2, because coefficients of merges are chosen on other "
                "images than are reported"
            )
        return min(samples, count // 2)

    def _measured(self, merge: Merge, *, is_reported: bool) -> dict[str, tuple[float, float]]:
        """Mean loss and accuracy of a merge on each merged expert's tasks, keyed by the expert's alias.

        If `is_reported` is True, the images for reports are used; otherwise the images for choosing coefficients.
        """
        recipe = Recipe.uniform(
            merge,
            models=self._fingerprints,
            base=self._engine.base_recipe.base,
            num_layers=len(self._engine.base_recipe.layers),
        )
        self._engine.swap(recipe)
        found = {}
        for source in merge.sources:
            pairs = [self._of_task(task, is_reported=is_reported) for task in self._tasks[source.model]]
            losses, values = zip(*pairs, strict=True)
            found[source.model] = sum(losses) / len(losses), sum(values) / len(values)
        return found

    @torch.no_grad()
    def _of_task(self, spec: TaskSpec, *, is_reported: bool) -> tuple[float, float]:
        prepared, middle = self._evaluator.task(spec), self._middle[spec.digest]
        stop = min(middle + self._samples, len(prepared.task.order))
        places = range(middle, stop) if is_reported else range(middle)
        loss, right = 0.0, 0
        for start in range(0, len(places), BATCH):
            part = places[start : start + BATCH]
            logits = self._evaluator.logits(spec, part)
            labels = torch.tensor([prepared.outputs[place] for place in part], device=logits.device)
            loss += float(cross_entropy(logits, labels, reduction="sum"))
            largest = logits.topk(min(prepared.task.num_largest, logits.shape[1]), dim=1).indices
            right += int((largest == labels[:, None]).any(dim=1).sum())
        return loss / len(places), right / len(places)
