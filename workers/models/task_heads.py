"""Heads of classifiers: the part of a model that maps features to the classes of one task.

Heads are not merged. A merge is scored on a task with the head of the model that the task names. A classifier has one
head, which is linear. The text tower of a whole CLIP model can make a zero-shot head for any classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workers.errors import InvalidTask
from workers.models.checkpoints import Checkpoint
from workers.models.zero_shot import class_embeddings

if TYPE_CHECKING:
    import torch

__all__ = [
    "BIAS",
    "HEADS_DIR",
    "PROJECTION",
    "WEIGHT",
    "HeadTensors",
    "TaskHead",
    "has_zero_shot_heads",
    "head_tensors",
    "logits_of",
    "task_head",
    "task_heads",
    "zero_shot_head",
]

WEIGHT, BIAS = "classifier.weight", "classifier.bias"
# CLIP's map from image features to the space that images and texts share, [projection_dim, hidden_size].
PROJECTION = "visual_projection.weight"
# The default must not change, because scores of stored studies depend on it.
DEFAULT_TEMPLATES = ("a photo of a {}.",)

# The folder of an export with a file for each head.
HEADS_DIR = "heads"


@dataclass(frozen=True)
class TaskHead:
    """Description of a classification head: the alias of its model, the number of classes, and the classes' names.

    `labels` has a name for each class, in the order of the head's outputs. It is None if the model's configuration does
    not name the classes; transformers then calls them LABEL_0, LABEL_1 and so on. `templates` are the texts that
    describe a class to CLIP's text tower; they are None unless the head is a zero-shot head.
    """

    alias: str
    num_classes: int
    labels: tuple[str, ...] | None
    templates: tuple[str, ...] | None = None

    def order_of(self, classes: Sequence[str], *, is_ordered: bool, where: str) -> tuple[int, ...]:
        """Index of the head's output for each of the task's `classes`.

        With `is_ordered`, the classes are given in the order of the outputs. Otherwise they are found by name or, if
        the head's classes have no names, are taken in the order of the outputs. Raises InvalidTask if the head has
        another number of classes, or lacks one of the classes. `where` names the task's data in messages.
        """
        if len(classes) != self.num_classes:
            raise InvalidTask(
                f"{where}: has {len(classes)} classes, the head of {self.alias!r} has {self.num_classes}; name the "
                "model that was trained on this task",
                "task.head",
            )
        if (
            is_ordered
            and self.labels is not None
            and set(classes) == set(self.labels)
            and self.labels != tuple(classes)
        ):
            raise InvalidTask(
                f"{where}: `classes` has the names of the head of {self.alias!r} in another order; its outputs are "
                f"{', '.join(self.labels[:10])}{' ...' if len(self.labels) > 10 else ''}; leave `classes` out",
                "task.classes",
            )
        if is_ordered or self.labels is None:
            return tuple(range(len(classes)))
        places = {label: index for index, label in enumerate(self.labels)}
        if unknown := sorted(set(classes) - places.keys()):
            raise InvalidTask(
                f"{where}: has the class {unknown[0]!r}, which the head of {self.alias!r} does not know; its classes "
                f"are {', '.join(self.labels[:10])}{' ...' if len(self.labels) > 10 else ''}; give `classes`, in the "
                "order of the head's outputs",
                "task.classes",
            )
        return tuple(places[name] for name in classes)


@dataclass(frozen=True)
class HeadTensors:
    """Weight [num_classes, hidden_size] and bias [num_classes] of a classification head, in their stored dtype."""

    weight: torch.Tensor
    bias: torch.Tensor


def task_head(alias: str, checkpoint: Checkpoint) -> TaskHead | None:
    """Description of the classification head of a model; None if the model has no head.

    `checkpoint` is the model, and `alias` is its name. An encoder that was stored alone has no head.
    """
    weight = checkpoint.tensors.get(WEIGHT)
    if weight is None or WEIGHT not in checkpoint.layout.task_heads:
        return None
    stated = checkpoint.config.get("id2label")
    labels = None
    if isinstance(stated, Mapping) and len(stated) == weight.shape[0]:
        names = [str(stated.get(str(index), stated.get(index))) for index in range(len(stated))]
        if names != [f"LABEL_{index}" for index in range(len(names))]:
            labels = tuple(names)
    return TaskHead(alias, weight.shape[0], labels)


def task_heads(checkpoints: Mapping[str, Checkpoint]) -> dict[str, TaskHead]:
    """Descriptions of the models' classification heads, keyed by alias; models without a head are left out."""
    found = {alias: task_head(alias, checkpoint) for alias, checkpoint in checkpoints.items()}
    return {alias: head for alias, head in found.items() if head is not None}


def head_tensors(checkpoint: Checkpoint) -> HeadTensors:
    """Read weight and bias of a model's classification head. Raises InvalidModel if the model has no head."""
    return HeadTensors(checkpoint.read(WEIGHT), checkpoint.read(BIAS))


def has_zero_shot_heads(checkpoint: Checkpoint) -> bool:
    """Whether the model is a whole CLIP model, whose text tower computes a zero-shot head for any classes.

    An adapter to a whole CLIP model has the heads of that model.
    """
    return checkpoint.config.get("model_type") == "clip" and PROJECTION in _with_towers(checkpoint).tensors


def _with_towers(checkpoint: Checkpoint) -> Checkpoint:
    """The CLIP model whose text tower and projection `checkpoint` has: itself or, for an adapter, its base."""
    return checkpoint if checkpoint.base is None else checkpoint.base


def zero_shot_head(
    alias: str, classes: Sequence[str] | None, templates: Sequence[str] | None, *, where: str
) -> TaskHead:
    """Describe the zero-shot head of the CLIP model `alias` for a task's `classes`.

    `templates` are the texts that describe a class; None means the default template. Raises InvalidTask if `classes` is
    None or contains an empty name, because the head needs the names of the classes. `where` names the task's data in
    messages.
    """
    if classes is None:
        message = f"{where}: labels are numbers, and a zero-shot head needs the classes' names; give `classes`"
        raise InvalidTask(message, "task.classes")
    if (index := next((i for i, name in enumerate(classes) if not name.strip("_ ")), None)) is not None:
        message = f"{where}: class {index} has the name {classes[index]!r}; expected words that describe its images"
        raise InvalidTask(message, "task.classes")
    return TaskHead(alias, len(classes), tuple(classes), tuple(templates or DEFAULT_TEMPLATES))


def logits_of(
    head: TaskHead, checkpoint: Checkpoint, *, dtype: str, device: torch.device | str = "cpu"
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the function that computes a head's logits from features, in float32 on `device`.

    The function maps features [num_images, hidden_size] to logits [num_images, num_classes]. `checkpoint` is the model
    that has the head. A linear head multiplies features by its weight and adds its bias. A zero-shot head projects and
    normalises the features, and multiplies them by the embeddings of the classes. Weights are first rounded to `dtype`,
    as in exports. Raises InvalidTask if CLIP's text tower cannot embed the classes.
    """
    import torch
    from torch.nn.functional import linear, normalize

    def rounded(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(getattr(torch, dtype)).float().to(device)

    if head.templates is None:
        found = head_tensors(checkpoint)
        weight, bias = rounded(found.weight), rounded(found.bias)
        return lambda features: linear(features, weight, bias)
    assert head.labels is not None
    whole = _with_towers(checkpoint)
    classes = class_embeddings(whole.directory, head.labels, head.templates, dtype=dtype).to(device)
    projection = rounded(whole.read(PROJECTION))
    return lambda features: linear(normalize(linear(features, projection), dim=-1), classes)
