"""TrainingModality: interface for fine-tuning the models of one modality, such as text models or image classifiers.

An implementation provides training data, the model with its loss, and evaluation. The trainer, optimizers, checkpoints
and history are the same for all modalities. The declaration of a modality (package `workers.models.modalities`) names
its implementation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from search_spaces.errors import Problem
from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.training.finetuning.spec import FinetuneSpec

if TYPE_CHECKING:
    import torch

    from search_spaces.recipe import Merge
    from workers.training.mergopt.tangent import TangentModel
    from workers.types import TaskSpec

__all__ = [
    "IGNORED",
    "EvaluationCheck",
    "Examples",
    "MergeMeasurement",
    "MergeReport",
    "ModelScorer",
    "TrainingModality",
    "training_of",
]

# The label of an output without loss.
IGNORED = -100


class Examples(Protocol):
    """Interface of training data: numbered rows. Each update of the weights uses a batch of rows.

    A row is one entry of a batch: a sequence of packed documents, or an image.
    """

    unit: str
    """What a target is, in the plural, such as "tokens"; the key under which the history counts targets."""

    def __len__(self) -> int:
        """The number of rows of the training data."""
        ...

    def num_targets(self, row: int) -> int:
        """The number of targets of a row: the tokens or images whose losses the training loss includes."""
        ...

    def origins(self, row: int) -> Sequence[str]:
        """The sources of a row, such as lines of a file, for messages."""
        ...

    def inputs(self, rows: Sequence[int]) -> dict[str, Any]:
        """Inputs for one forward pass over some rows: the model's keyword arguments, and `labels`.

        The label IGNORED means no loss. If `rows` is empty, the inputs are for a single row without targets.
        """
        ...

    def forward_pass(self) -> AbstractContextManager[None]:
        """Context manager that must be open while the model is called with results of the method `inputs`."""
        ...


class ModelScorer(Protocol):
    """Interface of an object that scores a fine-tuning's evaluation objectives on the model in training."""

    def values(self) -> dict[str, float]:
        """Score the model with its current weights, and return the mean metric of each objective."""
        ...


class EvaluationCheck(NamedTuple):
    """Findings of the check of a fine-tuning's evaluation tasks, before the training.

    `problems` have the places of options in the specification of the expert. `notes` are messages for the user about
    tasks that can be scored.
    """

    problems: tuple[Problem, ...] = ()
    notes: tuple[str, ...] = ()


class MergeReport(NamedTuple):
    """Losses and metrics of a merge, measured on samples that are used only for reports.

    `losses` maps the alias of each merged expert to the mean loss on the expert's tasks. `values` maps the alias to the
    mean metric on these tasks.
    """

    losses: Mapping[str, float]
    values: Mapping[str, float]


class MergeMeasurement(Protocol):
    """Interface for measuring losses and metrics of merges of trained experts, on each expert's tasks.

    Each task's samples are divided into two parts. The coefficients of a merge are chosen by the losses on one part,
    and the losses and metrics in reports are measured on the other part.
    """

    def of(self, merge: Merge) -> Mapping[str, float]:
        """Measure a merge's mean loss on each merged expert's tasks, on the samples for choosing coefficients.

        The losses are keyed by the expert's alias. Each task has some samples for choosing coefficients, and other
        samples for reports.
        """
        ...

    def report(self, merge: Merge) -> MergeReport:
        """Measure a merge's mean loss and metric on each merged expert's tasks, on the samples reserved for reports."""
        ...


class TrainingModality(Protocol):
    """Interface for fine-tuning the models of one modality, such as text models or image classifiers."""

    reads_by_unit: bool
    """Whether ranks may read the base's weights unit by unit, where no rank has memory for the whole model."""

    def check(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> None:
        """Check the training data and the base model of the fine-tuning `spec` without reading weights.

        `base` is the directory of the base model. `access` limits the files that data may name; None is no limit.
        Raises InvalidModel for problems of the base, and InvalidTask for problems of the data.
        """
        ...

    def examples(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> Examples:
        """Read the training data of `spec`. Raises InvalidTask, with the place in the data, if they cannot be used."""
        ...

    def network(
        self, spec: FinetuneSpec, base: Path, access: FileAccess | None, options: Mapping[str, Any]
    ) -> torch.nn.Module:
        """Load the transformers model that is trained; its frozen parameters have `requires_grad` False.

        `base` is the directory of the base model. `options` are passed to transformers' method `from_pretrained`.
        `access` limits the files that the data may name; None is no limit. Raises InvalidModel if the model cannot be
        loaded.
        """
        ...

    def is_head(self, name: str) -> bool:
        """Whether the parameter `name` belongs to a task's head, which merges do not change."""
        ...

    def loss(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model in a module that returns the sum of the losses over all targets.

        If the inputs have no `labels`, the module returns the model's outputs.
        """
        ...

    def output_of(self, model: torch.nn.Module) -> str:
        """Name of the output of `model` that losses are computed from; the method `tangent` linearizes this output."""
        ...

    def save(
        self,
        base: Path,
        model: Any,
        place: Path,
        *,
        dtype: torch.dtype,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> None:
        """Write a trained model to the directory `place`, with all parts of the base model that it was trained without.

        `base` is the directory of the base model. `weights` are the trained weights, keyed by the names of `model`. If
        `weights` is None, the weights of `model` are rounded to `dtype` in place and written.
        """
        ...

    def prepare(self, spec: FinetuneSpec, model: Any, examples: Any, device: torch.device) -> None:
        """Check that a loaded model supports the options of `spec`, and set up the model and the data for training.

        `model` is an object of the class `models.TrainedModel`, `examples` are the training data, and `device` is the
        model's device. Raises InvalidModel if the model does not support an option.
        """
        ...

    def linearized(self, tangent: TangentModel) -> Any:
        """Wrap a linearized model, so that it can be the argument `called` of the method `evaluation`.

        The model `tangent` is linear in its weights; the fine-tuning method `tangent` trains such models.
        """
        ...

    def adapter_options(self) -> Mapping[str, Any]:
        """Options of peft's LoraConfig that depend on the modality."""
        ...

    def tokens_of_row(self, spec: FinetuneSpec, settings: Mapping[str, Any]) -> int:
        """The largest number of tokens of a row; `settings` is the model's configuration."""
        ...

    def evaluation(
        self, spec: FinetuneSpec, base: Path, model: Any, called: Any, access: FileAccess | None
    ) -> ModelScorer:
        """Make the scorer of the evaluation objectives in `spec.evaluation`, which must not be None.

        `model` is the model in training. `called` is the callable that computes its outputs: `model` itself, its
        linearization, or, if it has shards, a wrapper that computes on all ranks. `base` is the directory of the base
        model. `access` limits the files that tasks may use; None is no limit. Raises InvalidTask if a task cannot be
        built.
        """
        ...

    def check_evaluation(self, spec: FinetuneSpec, base: Path, tasks: Mapping[int, TaskSpec]) -> EvaluationCheck:
        """Check without weights whether the model in training can be scored on the evaluation tasks of `spec`.

        `base` is the directory of the base model, and `tasks` are the tasks, keyed by their index in
        `evaluation.objectives`. The data of `spec`, the base and the data of the tasks have been checked before.
        """
        ...

    def lack_of_losses(self, spec: FinetuneSpec, task: TaskSpec) -> str | None:
        """Reason why the loss of merged models cannot be measured on an expert's task; None if it can be measured.

        `spec` is the fine-tuning of the expert, and `task` is one of its evaluation tasks. The text is the end of a
        sentence about the task, such as "has no reference answers". Raises InvalidTask if the task cannot be used.
        """
        ...

    def merge_losses(
        self,
        experts: Mapping[str, FinetuneSpec],
        directories: Mapping[str, Path],
        tasks: Mapping[str, Sequence[TaskSpec]],
        *,
        samples: int,
        is_linearized: bool,
    ) -> MergeMeasurement:
        """Prepare to measure losses and metrics of merges of trained experts, on each expert's tasks.

        `directories` and `tasks` have each expert's directory and evaluation tasks, keyed by alias. `samples` samples
        of each task are for choosing coefficients, and `samples` other samples are for reports. `is_linearized` says
        whether the experts are linearizations of the base. Raises InvalidModel or InvalidTask if a model or a task
        cannot be used.
        """
        ...

    def data_digest(self, spec: FinetuneSpec) -> str | None:
        """Digest (hex) of the training data; None if the data are not in files that `spec` names."""
        ...


def training_of(base: Path) -> TrainingModality:
    """The TrainingModality object for the modality of the base model in the directory `base`.

    The modality is the kind of data that the model reads, such as text. Raises InvalidModel if the base model cannot be
    read.
    """
    return cast("TrainingModality", open_checkpoint(base).modality.training_module())
