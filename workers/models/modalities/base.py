"""The declaration of a modality: what is specific to models that read one kind of data."""

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
    """Declaration of a modality, such as text: its models' layout, heads and files, and what scores them.

    Objects in packages above `workers.models` are named as "module:attribute", and imported when they are used.

    - `name`: the modality's name, such as "image"
    - `model_types`: values of `model_type` in config.json that belong to it; the modality of all others is text
    - `auto_class`: the class of transformers that loads its models
    - `files`: names of files besides weights and config.json that define how a model reads data
    - `structure`: fields of the configuration, in addition to those of all models, that must be equal for merging
    - `has_vocabulary`: whether models have an embedding with a row for each token, and prompts of tokens
    - `runs_on_vllm`: whether engines of vLLM score the models
    - `copies_on_cpu`: copies of a merge's weights in the host memory of an engine on CPU
    - `cache_bytes`: bytes of data that an engine caches besides
    - `layout`: assigns each tensor to a layer and component. Arguments are the configuration with common names and
      the tensors' names. Tensors of task heads are in `Layout.task_heads`, and are never merged
    - `canonical`: the name of a stored tensor in the layout, from the configuration and the name in the file; None for
      a tensor that no task needs
    - `problems`: yields reasons why a single model cannot be used, from its settings, layout and tensors
    - `differences`: yields reasons why two models' files differ so that they cannot be merged, from the directories of
      the base and the expert
    - `check_files`: checks the files of the model in a directory; raises InvalidModel
    - `task_key`: the key under which a task's description in a study file names the data; None if tasks have several
      forms
    - `tasks`: the `workers.evaluation.task_reader.TaskReader` of its tasks
    - `worker`: the class of the worker in a replica (`workers.serving.replica.Worker`)
    - `training`: how its models are fine-tuned (`workers.training.finetuning.modality.TrainingModality`)
    - `losses`: the class of the losses by which coefficients have gradients (`workers.training.task_losses.TaskLosses`)
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

    def task_reader(self) -> Any:
        """The reader of the modality's evaluation tasks (`workers.evaluation.task_reader.TaskReader`)."""
        return _loaded(self.tasks)

    def training_module(self) -> Any:
        """How the modality's models are fine-tuned (`workers.training.finetuning.modality.TrainingModality`)."""
        return _loaded(self.training)

    def losses_class(self) -> Any:
        """The class of the losses by which coefficients have gradients (`workers.training.task_losses.TaskLosses`)."""
        return _loaded(self.losses)

    def worker_class(self) -> Any:
        """The class of the worker that scores the modality's models in a replica."""
        return _loaded(self.worker)


def _loaded(place: str) -> Any:
    """Import the object that `place` names as "module:attribute"."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
