"""What a modality must offer for its models to be fine-tuned: training data, the model with its loss, evaluation.

The trainer, optimizers, checkpoints and history are the same for all modalities. A modality names its implementation in
its declaration (`workers.models.modalities`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from workers.file_access import FileAccess
from workers.models.checkpoints import open_checkpoint
from workers.training.finetuning.spec import FinetuneSpec

if TYPE_CHECKING:
    import torch

    from search_spaces.recipe import Merge
    from workers.training.mergopt.tangent import TangentModel
    from workers.types import TaskSpec

__all__ = ["IGNORED", "Examples", "MergeMeasurement", "MergeReport", "ModelScorer", "TrainingModality", "training_of"]

# The label of an output without loss.
IGNORED = -100


class Examples(Protocol):
    """Training data as numbered rows, from which the batches of updates are made.

    A row is what a forward pass reads at one place of the batch: a line of packed documents, or an image.
    """

    unit: str
    """What a target is, in the plural, such as "tokens"; the key under which the history counts targets."""

    def __len__(self) -> int:
        """The number of rows."""
        ...

    def num_targets(self, row: int) -> int:
        """The number of outputs of a row whose loss counts."""
        ...

    def origins(self, row: int) -> Sequence[str]:
        """The sources of a row, such as lines of a file, for messages."""
        ...

    def inputs(self, rows: Sequence[int]) -> dict[str, Any]:
        """Inputs for one forward pass over some rows: the model's tensors and numbers, and `labels`.

        The label IGNORED means no loss. Without rows, the inputs are those of a single row without targets.
        """
        ...

    def forward_pass(self) -> AbstractContextManager[None]:
        """Context manager for forward passes with these inputs."""
        ...


class ModelScorer(Protocol):
    """Scorer of the evaluation objectives on the model in training."""

    def values(self) -> dict[str, float]:
        """Score the model with its current weights, and return the mean metric of each objective."""
        ...


class MergeReport(NamedTuple):
    """Losses and metrics of a merge, measured on samples that are used only for reports.

    `losses` has the mean loss on the tasks of each merged expert, by the expert's alias. `values` has the mean metric
    on the tasks of each merged expert, by the expert's alias.
    """

    losses: Mapping[str, float]
    values: Mapping[str, float]


class MergeMeasurement(Protocol):
    """Measurement of losses and metrics of merges of trained experts, on each expert's tasks."""

    def of(self, merge: Merge) -> Mapping[str, float]:
        """Measure a merge's mean loss on each merged expert's tasks, with the samples for choosing coefficients."""
        ...

    def report(self, merge: Merge) -> MergeReport:
        """Measure a merge's mean loss and metric on each merged expert's tasks, with the samples for reports."""
        ...


class TrainingModality(Protocol):
    """Fine-tuning of the models of one modality."""

    reads_by_unit: bool
    """Whether ranks may read the base's weights unit by unit, where no rank has memory for the whole model."""

    def check(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> None:
        """Check data and base model without reading weights.

        `base` is the directory of the base model. `access` limits the files that data may name; None is no limit.
        Raises InvalidModel for problems of the base, and InvalidTask for problems of the data.
        """
        ...

    def examples(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> Examples:
        """Read the training data. Raises InvalidTask, which names the place of the problem."""
        ...

    def network(
        self, spec: FinetuneSpec, base: Path, access: FileAccess | None, options: Mapping[str, Any]
    ) -> torch.nn.Module:
        """Load the transformers model that is trained; parameters that stay frozen need no gradient.

        `options` are passed to `from_pretrained`. Raises InvalidModel if the model cannot be loaded.
        """
        ...

    def is_head(self, name: str) -> bool:
        """Whether the parameter `name` belongs to a task's head, which merges do not change."""
        ...

    def loss(self, model: torch.nn.Module) -> torch.nn.Module:
        """Wrap a model in a module that returns the sum of losses, or the model's outputs if there are no `labels`."""
        ...

    def prepare(self, spec: FinetuneSpec, model: Any, examples: Any, device: torch.device) -> None:
        """Check a loaded model (`models.TrainedModel`) for the options of `spec`; fit it and its data to each other.

        `examples` are those of this modality, and `device` is where the model computes. Raises InvalidModel.
        """
        ...

    def linearized(self, tangent: TangentModel) -> Any:
        """Wrap the linearization that the method tangent trains in what `evaluation` calls in place of the model."""
        ...

    def adapter_options(self) -> Mapping[str, Any]:
        """Options of peft's LoraConfig that depend on the modality."""
        ...

    def tokens_of_row(self, spec: FinetuneSpec, settings: Mapping[str, Any]) -> int:
        """The number of positions that a row has in the model at most, by the model's configuration `settings`."""
        ...

    def evaluation(
        self, spec: FinetuneSpec, base: Path, model: Any, called: Any, access: FileAccess | None
    ) -> ModelScorer:
        """The scorer of `spec.evaluation`, which must be given.

        `model` is the model in training, and `called` what is called in its place. Raises InvalidTask if a task cannot
        be built.
        """
        ...

    def lack_of_losses(self, spec: FinetuneSpec, task: TaskSpec) -> str | None:
        """Reason why losses of merges of an expert cannot be measured on one of its evaluation tasks, or None.

        The text continues a sentence about the task: "has no reference answers ...".
        Raises InvalidTask if the task cannot be used.
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
        """Prepare to measure merges of trained experts, whose directories and evaluation tasks are given by alias.

        `samples` of each task are for choosing coefficients, and as many others for reports. `is_linearized` says
        whether merges are those of linearizations of the base. Raises InvalidModel and InvalidTask.
        """
        ...

    def data_digest(self, spec: FinetuneSpec) -> str | None:
        """Digest (hex) of the training data; None if they are not in files that are named."""
        ...


def training_of(base: Path) -> TrainingModality:
    """The fine-tuning of models like the one in the directory `base`. Raises InvalidModel if it cannot be read."""
    return cast("TrainingModality", open_checkpoint(base).modality.training_module())
