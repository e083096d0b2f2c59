"""Scoring of image tasks: a merge computes features, and the classification head that a task names gives logits.

The head belongs to a source model, and is not merged.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from workers.engines.images.pixels import Pixels
from workers.errors import InvalidTask, TrialFailed
from workers.evaluation.image_pictures import pictures_of
from workers.evaluation.image_responses import Response
from workers.evaluation.image_tasks import IMAGE_TASKS, PreparedTask, prepared_task, texts_of
from workers.models.checkpoints import Checkpoint
from workers.models.family import ResolvedFamily
from workers.models.task_heads import TaskHead, logits_of
from workers.types import SamplePictures, SampleResult, SampleTexts, Span, TaskInfo, TaskSpec

__all__ = ["BATCH", "ImageEvaluator", "largest_entropy", "value_of"]

BATCH = 64  # images at a time: bounds memory, not speed
MOST_TASKS = 16  # tasks whose files and labels are kept
NUM_SHOWN = 5  # classes with the largest logits in a response


def value_of(prepared: PreparedTask, position: int, logprobs: torch.Tensor) -> float:
    """The value of the task's metric for the sample at `position`.

    `logprobs` [num_classes] has the model's log-probabilities of the classes.
    """
    if prepared.task.is_entropy:
        return min(1.0, entropy(logprobs) / largest_entropy(len(logprobs)))  # float32 rounds equal logits above 1
    ranked: Any = torch.sort(logprobs, descending=True, stable=True)  # equal logits: the first output counts
    return float(prepared.outputs[position] in ranked.indices[: prepared.task.num_largest].tolist())


def largest_entropy(num_classes: int) -> float:
    """Entropy of `num_classes` equally likely classes, in nats.

    For a single class the result is the entropy of two classes, so that it can be a divisor.
    """
    return math.log(max(2, num_classes))


def entropy(logprobs: torch.Tensor) -> float:
    """Entropy of the predicted classes, in nats; `logprobs` are the log-probabilities of the classes."""
    return max(0.0, -float((logprobs.exp() * logprobs).sum()))


class ImageEvaluator:
    """Evaluator that scores samples of image tasks with an engine's features and the heads of source models.

    `sources` are the source models. `features` is the function of the engine that maps preprocessed images to features
    [num_images, hidden_size] in float32; `device` is the device of the features. `pixels` reads images. `dtype` is the
    engine's dtype, to which heads are rounded. The most recently used tasks are kept for later calls.
    """

    def __init__(
        self,
        sources: ResolvedFamily,
        features: Callable[[torch.Tensor], torch.Tensor],
        pixels: Pixels,
        *,
        dtype: str = "float32",
        device: torch.device | str = "cpu",
    ) -> None:
        self._sources = sources
        self.dtype = dtype
        self._features = features
        self._pixels = pixels
        self._device = torch.device(device)
        self._tasks: OrderedDict[str, PreparedTask] = OrderedDict()
        self._heads: OrderedDict[TaskHead, Callable[[torch.Tensor], torch.Tensor]] = OrderedDict()

    def _head(self, head: TaskHead) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function by which a classification head maps features to logits; recently used functions are cached."""
        found = self._heads.get(head)
        if found is None:
            checkpoint = self._sources.checkpoints[head.alias]
            found = self._heads[head] = logits_of(head, checkpoint, dtype=self.dtype, device=self._device)
            if len(self._heads) > MOST_TASKS:
                self._heads.popitem(last=False)
        self._heads.move_to_end(head)
        return found

    def checkpoint_of(self, head: TaskHead) -> Checkpoint | None:
        """The source model that has the classification head `head`; None if the head belongs to the base model."""
        return None if head.alias == self._sources.base_alias else self._sources.checkpoints[head.alias]

    def task(self, spec: TaskSpec) -> PreparedTask:
        """The image task of `spec` with its head, read at the first use. Raises InvalidTask if it cannot be used."""
        found = self._tasks.get(spec.digest)
        if found is None:
            found = self._tasks[spec.digest] = prepared_task(spec, self._sources)
            if len(self._tasks) > MOST_TASKS:
                self._tasks.popitem(last=False)
        self._tasks.move_to_end(spec.digest)
        return found

    def describe(self, spec: TaskSpec) -> TaskInfo:
        self.task(spec)
        return IMAGE_TASKS.check(spec)

    def sample_texts(self, spec: TaskSpec, start: int, stop: int) -> SampleTexts:
        return texts_of(self.task(spec).task, start, stop)

    def sample_pictures(self, spec: TaskSpec, start: int, stop: int) -> SamplePictures:
        return pictures_of(self.task(spec).task, start, stop)

    def prompts(self, span: Span) -> str:
        """The sha256 (hex) over the hashes of all images of a span (range of samples of one task), in order."""
        task = self.task(span.task).task
        total = hashlib.sha256()
        for index in task.order[span.start : span.stop]:
            total.update(bytes.fromhex(task.images.digests[index]))
        return total.hexdigest()

    def score(self, spans: Sequence[Span]) -> tuple[SampleResult, ...]:
        """Score the samples of `spans` (each a range of samples of one task), and return the results in order.

        Raises InvalidTask if a task cannot be used, and TrialFailed if logits are not finite.
        """
        return tuple(sample for span in spans for sample in self._score(span))

    def _score(self, span: Span) -> list[SampleResult]:
        prepared = self.task(span.task)
        count = len(prepared.task.order)
        if not 0 <= span.start <= span.stop <= count:
            raise InvalidTask(
                f"objective {span.objective}: samples {span.start}-{span.stop} requested of a task with {count} samples"
            )
        found = []
        for start in range(span.start, span.stop, BATCH):
            positions = range(start, min(start + BATCH, span.stop))
            logits = self.logits(span.task, positions)
            if not bool(torch.isfinite(logits).all()):
                raise TrialFailed(f"objective {span.objective}: the merge gives logits that are NaN or infinite")
            found += [
                self._result(span, prepared, position, of_image)
                for position, of_image in zip(positions, logits.log_softmax(-1).cpu(), strict=True)
            ]
        return found

    def logits(self, spec: TaskSpec, positions: Sequence[int]) -> torch.Tensor:
        """Logits [num_images, num_classes] of a task's classes for some of its images, in float32.

        `positions` are indices in the order in which the samples of the task `spec` are scored.
        """
        prepared = self.task(spec)
        return self._head(prepared.head)(self._features(self._pixels.of(prepared.task, positions)))

    def _result(self, span: Span, prepared: PreparedTask, position: int, logprobs: torch.Tensor) -> SampleResult:
        order: Any = torch.sort(logprobs, descending=True, stable=True)  # equal logits: the first output counts
        outputs = order.indices[:NUM_SHOWN].tolist()
        shown = [(prepared.names[output], float(logprobs[output])) for output in outputs[:NUM_SHOWN]]
        sample = prepared.task.images.samples[prepared.task.order[position]]
        return SampleResult(
            objective=span.objective,
            position=position,
            document=sample.name,
            value=value_of(prepared, position, logprobs),
            response=Response(tuple(shown)).to_json(),
        )
