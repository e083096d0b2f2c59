"""Losses of image tasks on merged encoders: the cross-entropy of labels, or the entropy of predictions.

A merge turns images into features, and the head of the model that a task names turns features into logits. Heads are
not merged, so losses have gradients only with respect to the encoder. The entropy needs no labels: to minimise it is
the method of Yang et al., "AdaMerging: Adaptive Model Merging for Multi-Task Learning", ICLR 2024 (arXiv 2310.02575,
section 3.2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.images.classifiers import ImageEncoder, new_encoder
from workers.engines.images.pixels import Pixels
from workers.engines.images.scoring import largest_entropy
from workers.errors import InvalidTask
from workers.evaluation.image_tasks import PreparedTask, prepared_task
from workers.merging.bank import Bank
from workers.models.task_heads import logits_of
from workers.training.memory import tokens_within
from workers.training.model import Leaves, ParameterPart, place
from workers.types import TaskSpec

__all__ = ["ImageLosses", "ImageTarget", "TrainableEncoder"]


class TrainableEncoder:
    """Image encoder with gradients; it implements the interface `workers.training.task_losses.WritableModel`.

    The encoder has the architecture of the base model in `bank`, in `dtype`. Its layers are the layers of the merge of
    the recipe `like`, or the layers of the base if `like` is None. Weights are NaN until a merge is written. With
    `recomputes`, activations within layers are computed again in the backward pass. The layers are divided over
    `device` and `more_devices`.
    """

    def __init__(
        self,
        bank: Bank,
        dtype: torch.dtype,
        *,
        device: torch.device,
        more_devices: Sequence[torch.device] = (),
        recomputes: bool = False,
        like: Recipe | None = None,
    ) -> None:
        self._num_layers = bank.layout.num_layers if like is None else len(like.layers)
        config = bank.base.config
        self._encoder: ImageEncoder = new_encoder(
            config, layers=self._num_layers, dtype=dtype, device=torch.device("cpu")
        )
        self.module: Any = self._encoder.module
        self.num_layers_on: Sequence[int] = place(self.module, (device, *more_devices))
        parameters = self._encoder.parameters
        self.memory: Mapping[str, torch.Tensor] = {name: leaf.detach() for name, leaf in parameters.items()}
        self.leaves: Leaves = [(leaf, {name: ParameterPart(leaf)}) for name, leaf in parameters.items()]
        self.device: torch.device = device
        if recomputes:
            self.recompute()

    def recompute(self) -> None:
        # transformers recomputes in training mode only. Nothing is random in this mode: see `new_encoder`.
        self.module.train()
        self.module.gradient_checkpointing_enable({"use_reentrant": False})

    def holds(self, recipe: Recipe, bank: Bank) -> bool:
        return len(recipe.layers) == self._num_layers

    def features(self, pixels: torch.Tensor) -> torch.Tensor:
        """Features of images, [num_images, hidden_size] in float32, with gradients if torch has gradients enabled."""
        return self._encoder.differentiable_features(pixels)


@dataclass(frozen=True)
class ImageTarget:
    """An image whose loss is computed: its task's digest, and its position in the order of scoring.

    The loss is the cross-entropy of the head's output `output`; if `output` is None, it is the entropy of the predicted
    classes.
    """

    task: str
    position: int
    output: int | None


class ImageLosses:
    """Losses of image classifiers; implements the interface `workers.training.task_losses.TaskLosses`.

    Losses are divided by the entropy of equally likely classes. Then the cross-entropy of a model that guesses is 1,
    and an entropy is at most 1.

    On the CPU, the number of images in a pass is limited, so that activations take at most `Modality.pass_bytes` bytes;
    a pass has at least one image. Passes on a GPU are limited by its free memory (module `workers.training.gradients`).
    """

    def __init__(self, bank: Bank, options: EngineOptions, *, dtype: torch.dtype) -> None:
        self._bank, self._dtype = bank, dtype
        self._pixels = Pixels(bank.sources.result_dir)
        self._tasks: dict[str, PreparedTask] = {}
        self._heads: dict[tuple[str, torch.device], Callable[[torch.Tensor], torch.Tensor]] = {}
        settings = bank.base.settings
        self._most_on_cpu: int | None = None  # tokens of a pass; None for a model on a GPU
        self._num_tokens = (int(settings["image_size"]) // int(settings["patch_size"])) ** 2 + 1

    def model(
        self,
        *,
        device: torch.device,
        more_devices: Sequence[torch.device] = (),
        recomputes: bool = False,
        like: Recipe | None = None,
    ) -> TrainableEncoder:
        model = TrainableEncoder(
            self._bank, self._dtype, device=device, more_devices=more_devices, recomputes=recomputes, like=like
        )
        self._most_on_cpu = None
        room = self._bank.sources.modality.pass_bytes
        if device.type == "cpu" and room:
            settings, layers = dict(self._bank.base.settings), sum(model.num_layers_on)
            size = self._dtype.itemsize
            self._most_on_cpu = tokens_within(room, settings, size, recomputes=recomputes, layers=max(1, layers))
        return model

    def targets(self, spec: TaskSpec, *, is_entropy: bool = False) -> Sequence[ImageTarget]:
        prepared = self._task(spec)
        if not is_entropy and not prepared.task.images.is_labelled:
            raise InvalidTask(f"{prepared.task.images.where}: its images have no labels; their loss is the entropy")
        return tuple(
            ImageTarget(spec.digest, position, None if is_entropy else output)
            for position, output in enumerate(prepared.outputs)
        )

    def unit(self, spec: TaskSpec) -> float:
        return largest_entropy(self._task(spec).head.num_classes)

    def size(self, target: ImageTarget) -> float:
        return largest_entropy(self._tasks[target.task].head.num_classes)

    def of_completion(self, spec: TaskSpec, position: int, tokens: Sequence[int]) -> ImageTarget:
        raise InvalidTask(f"{self._task(spec).task.images.where}: its answers are classes, not completions")

    def minibatches(self, targets: Sequence[ImageTarget], max_tokens: int) -> Iterator[list[int]]:
        if self._most_on_cpu is not None:
            max_tokens = min(max_tokens, self._most_on_cpu)
        most = max(1, max_tokens // self._num_tokens)
        for start in range(0, len(targets), most):
            yield list(range(start, min(start + most, len(targets))))

    def of_samples(self, model: TrainableEncoder, targets: Sequence[ImageTarget]) -> torch.Tensor:
        rows: dict[str, list[int]] = {}
        for row, target in enumerate(targets):
            rows.setdefault(target.task, []).append(row)
        pixels = [
            self._pixels.of(self._tasks[task].task, [targets[i].position for i in of]) for task, of in rows.items()
        ]
        features = model.features(torch.cat(pixels))
        found, start = [], 0
        for task, of_task in rows.items():
            logits = self._head(task, features.device)(features[start : start + len(of_task)])
            found.append(_losses(logits, [targets[row].output for row in of_task]))
            start += len(of_task)
        order = [row for of_task in rows.values() for row in of_task]
        places = torch.tensor(sorted(range(len(order)), key=order.__getitem__), device=features.device)
        return torch.cat(found).index_select(0, places)

    def _task(self, spec: TaskSpec) -> PreparedTask:
        if spec.digest not in self._tasks:
            self._tasks[spec.digest] = prepared_task(spec, self._bank.sources)
        return self._tasks[spec.digest]

    def _head(self, task: str, device: torch.device) -> Callable[[torch.Tensor], torch.Tensor]:
        """The function that computes logits by a task's head, on `device`; functions are cached.

        The head's weights are rounded to the model's dtype.
        """
        if (task, device) not in self._heads:
            head = self._tasks[task].head
            checkpoint = self._bank.sources.checkpoints[head.alias]
            dtype = str(self._dtype).removeprefix("torch.")
            self._heads[task, device] = logits_of(head, checkpoint, dtype=dtype, device=device)
        return self._heads[task, device]


def _losses(logits: torch.Tensor, outputs: Sequence[int | None]) -> torch.Tensor:
    """Loss of each row of `logits` [rows, classes]; `outputs` has the index of each row's right class, or None.

    The loss is the cross-entropy of the right class, or the entropy of the row if there is no right class.
    """
    labels = [output for output in outputs if output is not None]
    if len(labels) == len(outputs):
        return cross_entropy(logits, torch.tensor(labels, device=logits.device), reduction="none")
    assert not labels, "the samples of a task have one kind of loss"
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs).sum(-1)
