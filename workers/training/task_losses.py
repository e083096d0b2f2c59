"""Interface of the losses of tasks of one modality (text or images), whose gradients give derivatives for coefficients.

A modality defines the model into which merges are written, the data that the model reads, and the loss of a sample. The
module `workers.training.gradients` does the rest in the same way for all modalities: merging, derivatives with respect
to coefficients, and saving memory. The package `workers.models.modalities` names the class of each modality that
implements this interface.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.merging.bank import Bank
from workers.training.model import Leaves
from workers.types import TaskSpec

__all__ = ["TaskLosses", "WritableModel"]


class WritableModel(Protocol):
    """Interface of a model into which merges are written in place, and whose parameters have gradients.

    - `module`: the transformers model
    - `memory`: maps the name of each merged tensor to the part of the model's weights into which the tensor is written
    - `leaves`: for each parameter of `module`, a pair: the parameter, and its parts that are merged tensors, keyed by
      the tensor's name
    - `device`: the device of the inputs, and of all parameters outside layers
    - `num_layers_on`: the number of layers on `device`, then on each further device of the model
    """

    module: Any
    memory: Mapping[str, torch.Tensor]
    leaves: Leaves
    device: torch.device
    num_layers_on: Sequence[int]

    def recompute(self) -> None:
        """Enable activation checkpointing: activations within layers are recomputed in all later backward passes."""
        ...

    def holds(self, recipe: Recipe, bank: Bank) -> bool:
        """Whether this model has the layers of the merge of `recipe`, so that the merge can be written into it."""
        ...


ModelT = TypeVar("ModelT", contravariant=True)
TargetT = TypeVar("TargetT")


class TaskLosses(Protocol[ModelT, TargetT]):
    """Losses of one modality's tasks on merges of the models in a bank.

    The constructor takes the bank, the options of the study's engines, and the dtype in which the model computes.
    `ModelT` is the type of the model. `TargetT` is the type of targets; a target is the data from which the loss of a
    sample is computed, such as the tokens of the right answer. Every method raises InvalidTask if a task cannot be
    used.
    """

    def __init__(self, bank: Bank, options: EngineOptions, *, dtype: torch.dtype) -> None: ...

    def model(
        self,
        *,
        device: torch.device,
        more_devices: Sequence[torch.device] = (),
        recomputes: bool = False,
        like: Recipe | None = None,
    ) -> Any:
        """Make a model (`WritableModel`) with the layers of the merge of `like`; None means the layers of the base.

        The layers are divided over `device` and `more_devices`. With `recomputes`, activations within layers are
        computed again in the backward pass. Raises InvalidModel if the models cannot be used.
        """
        ...

    def targets(self, spec: TaskSpec, *, is_entropy: bool = False) -> Sequence[TargetT]:
        """The targets of all samples of the task `spec`, in the order in which they are scored.

        With `is_entropy`, the loss is the entropy of the predicted classes; otherwise it is the loss on the right
        answer.
        """
        ...

    def unit(self, spec: TaskSpec) -> float:
        """Divisor that makes losses on the task `spec` comparable with losses on other tasks.

        The divisor is the mean size of the task's samples (method `size`).
        """
        ...

    def size(self, target: TargetT) -> float:
        """Size of one sample on the scale of its loss.

        For a completion, the size is the number of scored tokens. For a choice between classes or options, it is the
        loss of a guess at which all are equally likely. The method `unit` returns the mean size of a task's samples.
        """
        ...

    def of_completion(self, spec: TaskSpec, position: int, tokens: Sequence[int]) -> TargetT:
        """The target of the sample at `position` if the completion `tokens` counts as its right answer."""
        ...

    def minibatches(self, targets: Sequence[TargetT], max_tokens: int) -> Iterator[list[int]]:
        """Divide targets into minibatches, each for one forward pass; yield the indices of each minibatch's targets.

        A minibatch has at most `max_tokens` tokens, or has a single target.
        """
        ...

    def of_samples(self, model: ModelT, targets: Sequence[TargetT]) -> torch.Tensor:
        """Compute the loss of `model` on each target by one forward pass, in float32: [len(targets)].

        The losses have gradients if torch has gradients enabled.
        """
        ...
