"""Fine-tuning of image classifiers: images with labels, cross-entropy, and the head of the task.

A head maps features to the classes of one task, and is not merged. An existing head is frozen in training, so that it
also fits the features of merges. For a task without a head in any model, a new head is trained. Images are prepared by
the base's own processor, without augmentations.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import cross_entropy

from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.image_tasks import (
    ENTROPY,
    ImageSet,
    ImageTask,
    check_decodable,
    check_right_answers,
    load_image_task,
    read_image_set,
)
from workers.file_access import FileAccess
from workers.models.checkpoints import Checkpoint, open_checkpoint
from workers.models.image_processors import decoded, load_processor, pixels_of
from workers.models.remote import locate
from workers.models.task_heads import TaskHead, head_tensors, task_head
from workers.training.finetuning.image_merge_losses import ImageMergeLosses
from workers.training.finetuning.modality import IGNORED
from workers.training.finetuning.spec import BASE_HEAD, NEW_HEAD, FinetuneSpec, task_of

if TYPE_CHECKING:
    from workers.training.finetuning.models import TrainedModel
    from workers.training.mergopt.tangent import TangentModel
    from workers.types import TaskSpec

__all__ = ["IMAGE_TRAINING", "ClassLoss", "ImageEvaluator", "ImageExamples", "ImageTraining"]

# Bytes of prepared images that a training keeps in memory; others are decoded again in each pass over the data.
KEPT_BYTES = 1 << 30

# Images that are scored in one forward pass of an evaluation.
BATCH = 64

HEAD = "classifier."


class ClassLoss(torch.nn.Module):
    """Module that wraps a classifier and returns the sum of its cross-entropies over images.

    `model` is a transformers or peft model, or a module that returns logits [images, classes].
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: torch.Tensor | None = None, **inputs: torch.Tensor) -> Any:
        """Sum of the losses of the images whose `labels` [images] are not IGNORED.

        `inputs` has `pixel_values` [images, channels, height, width]. Without `labels`, the result has the outputs of
        the model instead.
        """
        outputs = self.model(**inputs)
        if labels is None:
            return outputs
        logits = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        return cross_entropy(logits.float(), labels.to(logits.device), ignore_index=IGNORED, reduction="sum")


class ImageExamples:
    """Training images with their right classes; implements the interface `modality.Examples`.

    `images` are the training data. `order` has, for each class, the index of its logit in the output of the
    classification head. `processor` converts images to the model's input.
    """

    unit = "images"

    def __init__(self, images: ImageSet, order: Sequence[int], processor: Any) -> None:
        self._images, self._order, self._processor = images, order, processor
        self._kept: dict[int, torch.Tensor] = {}
        self._room = KEPT_BYTES

    def __len__(self) -> int:
        return len(self._images.samples)

    def num_targets(self, row: int) -> int:
        return 1

    def origins(self, row: int) -> Sequence[str]:
        return [str(self._images.samples[row].file)]

    def inputs(self, rows: Sequence[int]) -> dict[str, torch.Tensor]:
        pixels = torch.stack([self._pixels(row) for row in rows or [0]])
        labels = [self._order[self._images.samples[row].label] for row in rows] or [IGNORED]
        return {"labels": torch.tensor(labels), "pixel_values": pixels}

    def forward_pass(self) -> AbstractContextManager[None]:
        return nullcontext()

    def _pixels(self, row: int) -> torch.Tensor:
        """The image of a row as the model's input. Raises InvalidTask, with the file's name, if decoding fails."""
        if row not in self._kept:
            found = _prepared(self._images, row, self._processor)
            size = found.numel() * found.element_size()
            if size > self._room:
                return found
            self._room -= size
            self._kept[row] = found
        return self._kept[row]


class ImageEvaluator:
    """Scorer of a fine-tuning's evaluation tasks on the image classifier in training (`modality.ModelScorer`).

    - `spec`: the specification, with the section `evaluation`
    - `head`: the classification head of the model
    - `processor`: converts images to the model's input
    - `model`: the model in training
    - `called`: the callable that computes the outputs: `model` itself, its linearization, or, if it has shards, a
      wrapper that computes on all ranks
    - `access`: limits the files that tasks may use; None means no limit

    Raises InvalidTask if a task cannot be used, or is scored with the head of another model.
    """

    def __init__(
        self, spec: FinetuneSpec, head: TaskHead, processor: Any, *, model: Any, called: Any, access: FileAccess | None
    ) -> None:
        assert spec.evaluation is not None
        self._model, self._called, self._processor = model, called, processor
        self._samples = spec.evaluation.samples
        self._tasks: dict[str, tuple[ImageTask, tuple[int, ...]]] = {}
        for objective in spec.evaluation.objectives:
            task = load_image_task(task_of(objective, seed=spec.seed, access=access))
            check_right_answers(task)
            if task.head != spec.name:
                raise InvalidTask(
                    f"objective {objective.name!r}: its head is that of {task.head!r}; the expert in training has only "
                    f"its own: give head: {spec.name}",
                    "task.head",
                )
            self._tasks[objective.name] = task, _order(task.images, head)

    def values(self) -> dict[str, float]:
        was_training = self._model.training
        self._model.eval()
        try:
            return {name: self._value(task, order) for name, (task, order) in self._tasks.items()}
        finally:
            self._model.train(was_training)

    @torch.no_grad()
    def _value(self, task: ImageTask, order: Sequence[int]) -> float:
        device = next(self._model.parameters()).device
        chosen = task.order[: self._samples]
        right = 0
        for start in range(0, len(chosen), BATCH):
            part = chosen[start : start + BATCH]
            pixels = torch.stack([_prepared(task.images, index, self._processor) for index in part])
            outputs = self._called(pixel_values=pixels.to(device))
            logits = (outputs if isinstance(outputs, torch.Tensor) else outputs.logits).float()
            labels = torch.tensor([order[task.images.samples[index].label] for index in part], device=device)
            largest = logits.topk(min(task.num_largest, logits.shape[1]), dim=1).indices
            right += int((largest == labels[:, None]).any(dim=1).sum())
        return right / len(chosen)


class ImageTraining:
    """Fine-tuning of image classifiers; implements the interface `modality.TrainingModality`."""

    reads_by_unit = False

    def check(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> None:
        if open_checkpoint(base).settings["model_type"] == "clip_vision_model":
            raise InvalidModel((f"base: {base} is a CLIP model, which is not trained here; expected a ViT classifier",))
        images = _images(spec, base, access)
        _order(images, _head(spec, base, images))
        load_processor(base)
        check_decodable(images)
        if spec.adapter is not None and spec.data.head != BASE_HEAD:
            raise InvalidModel(
                (f"data.head: {spec.data.head}; an adapter has no head; expected {BASE_HEAD}, the base's",)
            )

    def examples(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> ImageExamples:
        images = _images(spec, base, access)
        return ImageExamples(images, _order(images, _head(spec, base, images)), load_processor(base))

    def network(
        self, spec: FinetuneSpec, base: Path, access: FileAccess | None, options: Mapping[str, Any]
    ) -> torch.nn.Module:
        from transformers import AutoModelForImageClassification

        head = _head(spec, base, _images(spec, base, access))
        names = head.labels or tuple(f"LABEL_{index}" for index in range(head.num_classes))
        with _without_report():
            model: torch.nn.Module = AutoModelForImageClassification.from_pretrained(
                base,
                trust_remote_code=False,
                id2label=dict(enumerate(names)),
                label2id={name: index for index, name in enumerate(names)},
                ignore_mismatched_sizes=True,  # of the base's head, which is replaced
                **options,
            )
        classifier: Any = model.get_submodule("classifier")
        with torch.no_grad():
            if spec.data.head == NEW_HEAD:
                classifier.weight.zero_()
                classifier.bias.zero_()
            else:
                tensors = head_tensors(_model_of_head(spec, base))
                classifier.weight.copy_(tensors.weight)
                classifier.bias.copy_(tensors.bias)
        classifier.requires_grad_(spec.data.head == NEW_HEAD)
        return model

    def is_head(self, name: str) -> bool:
        return name.startswith(HEAD) or f".{HEAD}" in name

    def loss(self, model: torch.nn.Module) -> ClassLoss:
        return ClassLoss(model)

    def prepare(self, spec: FinetuneSpec, model: TrainedModel, examples: Any, device: torch.device) -> None:
        """Do nothing: no model mixes the images of a batch, so nothing must be checked or adapted."""

    def linearized(self, tangent: TangentModel) -> TangentModel:
        return tangent

    def adapter_options(self) -> Mapping[str, Any]:
        return {"exclude_modules": ["classifier"]}

    def tokens_of_row(self, spec: FinetuneSpec, settings: Mapping[str, Any]) -> int:
        return (int(settings["image_size"]) // int(settings["patch_size"])) ** 2 + 1

    def evaluation(
        self, spec: FinetuneSpec, base: Path, model: Any, called: Any, access: FileAccess | None
    ) -> ImageEvaluator:
        head = _head(spec, base, _images(spec, base, access))
        return ImageEvaluator(spec, head, load_processor(base), model=model, called=called, access=access)

    def lack_of_losses(self, spec: FinetuneSpec, task: TaskSpec) -> str | None:
        if spec.method.kind == "tangent":
            return "has images: merges of linearized classifiers are not measured; leave out the analysis, or tangent"
        return "has images without right answers; use acc or acc_top5" if task.metric == ENTROPY else None

    def merge_losses(
        self,
        experts: Mapping[str, FinetuneSpec],
        directories: Mapping[str, Path],
        tasks: Mapping[str, Sequence[TaskSpec]],
        *,
        samples: int,
        is_linearized: bool,
    ) -> ImageMergeLosses:
        return ImageMergeLosses(locate(next(iter(experts.values())).base), directories, tasks, samples=samples)

    def data_digest(self, spec: FinetuneSpec) -> str | None:
        return None if spec.data.images is None else read_image_set(_description(spec)).content


IMAGE_TRAINING = ImageTraining()


@contextmanager
def _without_report() -> Iterator[None]:
    """Context manager that hides transformers' warnings about a missing head or a head of another size."""
    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _description(spec: FinetuneSpec) -> dict[str, Any]:
    """Describe the training data of the fine-tuning `spec` as an image task of a study file."""
    data = spec.data
    found = {
        "images": data.images,
        "head": spec.name,
        "classes": data.classes,
        "image": data.image,
        "label": data.label,
    }
    return {key: value for key, value in found.items() if value is not None}


def _images(spec: FinetuneSpec, base: Path, access: FileAccess | None) -> ImageSet:
    if spec.data.images is None:
        raise InvalidTask(
            f"data: {base} reads images; give images, a folder or a JSONL file, in place of file or dataset"
        )
    images = read_image_set(_description(spec), access)
    if not images.is_labelled:
        raise InvalidTask(f"data.images: {images.where}: its images have no labels; expected a label for each image")
    return images


def _model_of_head(spec: FinetuneSpec, base: Path) -> Checkpoint:
    return open_checkpoint(base if spec.data.head == BASE_HEAD else locate(spec.data.head))


def _head(spec: FinetuneSpec, base: Path, images: ImageSet) -> TaskHead:
    """Find the head with which an expert is trained: the base's head, the head of the model `data.head`, or a new head.

    Raises InvalidModel if the base or the model `data.head` should have the head but has none, or if the head is for
    features of another size than the base's. Raises InvalidTask if the classes of a new head are not known.
    """
    if spec.data.head == NEW_HEAD:
        if images.classes is None:
            raise InvalidTask(f"{images.where}: labels are numbers; give data.classes, because a new head has names")
        return TaskHead(spec.name, len(images.classes), images.classes)
    checkpoint = _model_of_head(spec, base)
    found = task_head(spec.name, checkpoint)
    if found is None:
        raise InvalidModel(
            (
                f"data.head: {spec.data.head}; {checkpoint.directory} has no head; give a model that has one for this "
                f"task, or {NEW_HEAD}, which is trained",
            )
        )
    sizes = [each.settings.get("hidden_size") for each in (open_checkpoint(base), checkpoint)]
    if sizes[0] != sizes[1]:
        raise InvalidModel(
            (f"data.head: {checkpoint.directory} has features of size {sizes[1]}; those of {base} have {sizes[0]}",)
        )
    return found


def _order(images: ImageSet, head: TaskHead) -> tuple[int, ...]:
    """Index of the head's output for each label of `images`. Raises InvalidTask if the head has other classes."""
    if images.classes is None:
        highest = max(sample.label for sample in images.samples)
        if highest >= head.num_classes:
            raise InvalidTask(f"{images.where}: has the label {highest}; the head has {head.num_classes} classes")
        return tuple(range(head.num_classes))
    return head.order_of(images.classes, is_ordered=images.is_ordered, where=images.where)


def _prepared(images: ImageSet, index: int, processor: Any) -> torch.Tensor:
    """One image as the model's input [channels, height, width]. Raises InvalidTask if the file is broken."""
    sample = images.samples[index]
    try:
        return pixels_of(processor, [decoded(images.read(sample), str(sample.file))])[0]
    except ValueError as error:
        raise InvalidTask(str(error)) from error
