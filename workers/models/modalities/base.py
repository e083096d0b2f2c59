"""The declaration of a modality: the properties that only models of one kind of data, such as images, have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workers.models.components import Layout

if TYPE_CHECKING:
    from workers.models.computed_tensors import SourceTensor

__all__ = ["Modality"]


@dataclass(frozen=True)
class Modality:
    """Declaration of a modality, such as text: layout, heads and files of its models, and the code that scores them.

    Objects in packages above `workers.models` are named as "module:attribute", and imported when they are used.

    - `name`: the modality's name, such as "image"
    - `model_types`: the values of `model_type` in config.json for models of this modality; the modality of models with
      an undeclared type is text
    - `auto_class`: the class of transformers that loads the models
    - `files`: names of the files besides weights and config.json that define how a model reads data
    - `structure`: fields of the configuration, in addition to those of all models, that must be equal for merging
    - `has_vocabulary`: whether models have an embedding with a row for each token, and prompts of tokens
    - `heads`: names of the tensors of a linear head for one task, which an adapter may store whole; empty if models
      have no heads
    - `has_pictures`: whether samples of the modality's tasks have small pictures for people to look at
    - `runs_on_vllm`: whether engines of vLLM score the models
    - `copies_on_cpu`: the number of copies of a merge's weights in host memory if an engine runs on the CPU
    - `cache_bytes`: the number of bytes that an engine needs in addition, for cached data
    - `pass_bytes`: the largest number of bytes of activations in a pass of gradients on the CPU; 0 is no limit
    - `layout`: a function that assigns each tensor to a layer and component. Arguments are the configuration with
      common names and the tensors' names. Tensors of task heads are in the field `Layout.task_heads`, and are never
      merged.
    - `canonical`: a function that returns the name of a stored tensor in the layout, from the configuration and the
      name in the file; None for a tensor that no task needs
    - `problems`: a function that yields reasons why a model cannot be used, from its settings, layout and tensors
    - `differences`: a function that yields reasons why a base and an expert cannot be merged, from differences between
      the files in their directories
    - `check_files`: a function that checks the files of the model in a directory; raises InvalidModel
    - `task_key`: the key that names the data in a task's description, in a study file; None if tasks have several forms
    - `tasks`: the reader of evaluation tasks (interface `workers.evaluation.task_reader.TaskReader`)
    - `worker`: the class of the worker in a replica (interface `workers.serving.replica.Worker`)
    - `training`: how models of the modality are fine-tuned (interface
      `workers.training.finetuning.modality.TrainingModality`)
    - `losses`: the class that computes losses with gradients (interface `workers.training.task_losses.TaskLosses`)
    """

    name: str
    model_types: frozenset[str]
    auto_class: str
    files: tuple[str, ...]
    structure: tuple[str, ...]
    has_vocabulary: bool
    runs_on_vllm: bool
    layout: Callable[[Mapping[str, Any], Iterable[str]], Layout]
    canonical: Callable[[Mapping[str, Any], str], str | None]
    problems: Callable[[Mapping[str, Any], Layout, Mapping[str, SourceTensor]], Iterator[str]]
    differences: Callable[[Path, Path], Iterator[str]]
    check_files: Callable[[Path], object]
    task_key: str | None
    tasks: str
    worker: str
    training: str
    losses: str
    copies_on_cpu: int = 1
    cache_bytes: int = 0
    pass_bytes: int = 0
    has_pictures: bool = False
    heads: frozenset[str] = frozenset()

    def task_reader(self) -> Any:
        """The reader of the modality's evaluation tasks (interface `workers.evaluation.task_reader.TaskReader`)."""
        return _loaded(self.tasks)

    def training_module(self) -> Any:
        """The implementation of fine-tuning for the modality (module `workers.training.finetuning.modality`)."""
        return _loaded(self.training)

    def losses_class(self) -> Any:
        """The class that computes losses with gradients (interface `workers.training.task_losses.TaskLosses`)."""
        return _loaded(self.losses)

    def worker_class(self) -> Any:
        """The class of the worker that scores the modality's models in a replica."""
        return _loaded(self.worker)


def _loaded(place: str) -> Any:
    """Import the object that `place` names as "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
