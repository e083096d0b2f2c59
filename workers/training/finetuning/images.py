"""Fine-tuning of image classifiers: images with labels, cross-entropy, and the head of the task.

A head maps features to the classes of one task, and is not merged. An existing head is frozen in training, so that it
also fits the features of merges. For a task without a head in any model, a new head is trained. Images are prepared by
the base's own processor, without augmentations.

Of a whole CLIP model, the vision tower is trained, because merges change nothing else. The projection of images and the
zero-shot head, which the text tower makes once, are frozen. The expert is a whole CLIP model again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn.functional import cross_entropy, linear, normalize

from workers.errors import InvalidModel, InvalidTask
from workers.evaluation.image_tasks import (
    ENTROPY,
    ImageSet,
    ImageTask,
    check_decodable,
    check_right_answers,
    check_sizes,
    load_image_task,
    read_image_set,
)
from workers.file_access import FileAccess
from workers.models.checkpoints import Checkpoint, open_checkpoint
from workers.models.image_processors import check_processor, decoded, load_processor, needed_size, pixels_of
from workers.models.remote import locate
from workers.models.task_heads import TaskHead, has_zero_shot_heads, head_tensors, task_head, zero_shot_head
from workers.models.zero_shot import check_prompts, class_embeddings
from workers.training.finetuning.image_merge_losses import ImageMergeLosses
from workers.training.finetuning.modality import IGNORED, EvaluationCheck
from workers.training.finetuning.result import save_model
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

# Modules that are no part of what merges change: a classifier's head, and the projection of images in CLIP.
HEADS = ("classifier", "visual_projection")

# The buffer of a CLIP model in training with the zero-shot head [classes, projection_dim].
EMBEDDINGS = "class_embeddings"


class ClassLoss(torch.nn.Module):
    """Module that wraps a classifier and returns the sum of its cross-entropies over images.

    `model` is a transformers or peft model, or a module that returns the output that such a model's loss is computed
    from: logits [images, classes], or the embeddings [images, projection_dim] of a CLIP model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer(EMBEDDINGS, _embeddings_of(model), persistent=False)

    def forward(self, labels: torch.Tensor | None = None, **inputs: torch.Tensor) -> Any:
        """Sum of the losses of the images whose `labels` [images] are not IGNORED.

        `inputs` has `pixel_values` [images, channels, height, width]. Without `labels`, the result has the outputs of
        the model instead.
        """
        outputs = self.model(**inputs)
        if labels is None:
            return outputs
        logits = _logits(outputs, self._buffers[EMBEDDINGS])
        return cross_entropy(logits, labels.to(logits.device), ignore_index=IGNORED, reduction="sum")


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
    - `base`: the directory of the base model
    - `head`: the classification head of the model in training
    - `processor`: converts images to the model's input
    - `model`: the model in training
    - `called`: the callable that computes the outputs: `model` itself, its linearization, or, if it has shards, a
      wrapper that computes on all ranks
    - `access`: limits the files that tasks may use; None means no limit

    A CLIP model has a zero-shot head for each task, which the task's classes and templates define. Raises InvalidTask
    if a task cannot be used, or is scored with the head of another model.
    """

    def __init__(
        self,
        spec: FinetuneSpec,
        base: Path,
        head: TaskHead,
        processor: Any,
        *,
        model: Any,
        called: Any,
        access: FileAccess | None,
    ) -> None:
        assert spec.evaluation is not None
        self._model, self._called, self._processor = model, called, processor
        self._samples = spec.evaluation.samples
        self._tasks: dict[str, _ScoredTask] = {}
        known = {(head.labels, head.templates): _embeddings_of(model)}
        for objective in spec.evaluation.objectives:
            task = load_image_task(task_of(objective, seed=spec.seed, access=access))
            check_right_answers(task)
            own = _head_of_task(task, head, name=spec.name, objective=objective.name)
            key = (own.labels, own.templates)
            if own.templates is not None and key not in known:
                assert own.labels is not None
                known[key] = class_embeddings(base, own.labels, own.templates)
            self._tasks[objective.name] = _ScoredTask(task, _order(task.images, own), known[key])

    def values(self) -> dict[str, float]:
        was_training = self._model.training
        self._model.eval()
        try:
            return {name: self._value(scored) for name, scored in self._tasks.items()}
        finally:
            self._model.train(was_training)

    @torch.no_grad()
    def _value(self, scored: _ScoredTask) -> float:
        task, order, embeddings = scored
        device = next(self._model.parameters()).device
        chosen = task.order[: self._samples]
        right = 0
        for start in range(0, len(chosen), BATCH):
            part = chosen[start : start + BATCH]
            pixels = torch.stack([_prepared(task.images, index, self._processor) for index in part])
            logits = _logits(self._called(pixel_values=pixels.to(device)), embeddings)
            labels = torch.tensor([order[task.images.samples[index].label] for index in part], device=device)
            largest = logits.topk(min(task.num_largest, logits.shape[1]), dim=1).indices
            right += int((largest == labels[:, None]).any(dim=1).sum())
        return right / len(chosen)


class ImageTraining:
    """Fine-tuning of image classifiers; implements the interface `modality.TrainingModality`."""

    reads_by_unit = False

    def check(self, spec: FinetuneSpec, base: Path, access: FileAccess | None) -> None:
        images = _images(spec, base, access)
        head = _head(spec, base, images)
        _order(images, head)
        if head.templates is not None:
            assert head.labels is not None
            check_prompts(base, head.labels, head.templates)
        check_processor(base)
        check_decodable(images)
        if (size := needed_size(base)) is not None:
            check_sizes(images, size)
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
        if head.templates is not None:
            return _vision_tower(base, head, options)
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
        return any(part in HEADS for part in name.split("."))

    def output_of(self, model: torch.nn.Module) -> str:
        return "logits" if _embeddings_of(model) is None else "image_embeds"

    def save(
        self,
        base: Path,
        model: Any,
        place: Path,
        *,
        dtype: torch.dtype,
        weights: Mapping[str, torch.Tensor] | None,
    ) -> None:
        if _embeddings_of(model) is None:
            save_model(model, place, dtype=dtype, weights=weights)
            return
        from transformers import CLIPModel

        whole = CLIPModel.from_pretrained(base, dtype=dtype, trust_remote_code=False)
        found = whole.load_state_dict(model.state_dict() if weights is None else dict(weights), strict=False)
        assert not found.unexpected_keys, found.unexpected_keys
        save_model(whole, place, dtype=dtype)

    def loss(self, model: torch.nn.Module) -> ClassLoss:
        return ClassLoss(model)

    def prepare(self, spec: FinetuneSpec, model: TrainedModel, examples: Any, device: torch.device) -> None:
        """Do nothing: no model mixes the images of a batch, so nothing must be checked or adapted."""

    def linearized(self, tangent: TangentModel) -> TangentModel:
        return tangent

    def adapter_options(self) -> Mapping[str, Any]:
        return {"exclude_modules": list(HEADS)}

    def tokens_of_row(self, spec: FinetuneSpec, settings: Mapping[str, Any]) -> int:
        return (int(settings["image_size"]) // int(settings["patch_size"])) ** 2 + 1

    def evaluation(
        self, spec: FinetuneSpec, base: Path, model: Any, called: Any, access: FileAccess | None
    ) -> ImageEvaluator:
        head = _head(spec, base, _images(spec, base, access))
        return ImageEvaluator(spec, base, head, load_processor(base), model=model, called=called, access=access)

    def check_evaluation(self, spec: FinetuneSpec, base: Path, tasks: Mapping[int, TaskSpec]) -> EvaluationCheck:
        return EvaluationCheck()

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


class _ScoredTask(NamedTuple):
    """An evaluation task with the head's output for each of its labels, and the zero-shot head of a CLIP model.

    `embeddings` [classes, projection_dim] are None for a model with a linear head.
    """

    task: ImageTask
    order: tuple[int, ...]
    embeddings: torch.Tensor | None


def _head_of_task(task: ImageTask, head: TaskHead, *, name: str, objective: str) -> TaskHead:
    """The head that scores an evaluation task of the expert `name`, which is trained with `head`.

    Raises InvalidTask, whose message names `objective`, if the task names the head of another model.
    """
    assert isinstance(task.spec.task, Mapping)
    templates = task.spec.task.get("templates")
    is_zero_shot = head.templates is not None
    if task.head != name and not (is_zero_shot and task.head == BASE_HEAD):
        raise InvalidTask(
            f"objective {objective!r}: its head is that of {task.head!r}; the expert in training has only its own: "
            f"give head: {name}",
            "task.head",
        )
    if is_zero_shot:
        return zero_shot_head(name, task.images.classes, templates, where=task.images.where)
    if templates is not None:
        raise InvalidTask(
            f"objective {objective!r}: templates are for zero-shot heads of whole CLIP models; leave them out",
            "task.templates",
        )
    return head


def _vision_tower(base: Path, head: TaskHead, options: Mapping[str, Any]) -> torch.nn.Module:
    """Load the vision tower and projection of a whole CLIP model; its buffer EMBEDDINGS has the zero-shot head `head`.

    `base` is the model's directory. `options` are passed to transformers' method `from_pretrained`. The projection is
    frozen. Raises InvalidTask if the text tower cannot embed the classes.
    """
    from transformers import CLIPConfig, CLIPVisionModelWithProjection

    assert head.labels is not None
    assert head.templates is not None
    whole = CLIPConfig.from_pretrained(base)
    config = whole.vision_config
    config.projection_dim = whole.projection_dim
    with _without_report():
        model: torch.nn.Module = CLIPVisionModelWithProjection.from_pretrained(
            base, config=config, trust_remote_code=False, **options
        )
    model.get_submodule("visual_projection").requires_grad_(False)
    model.register_buffer(EMBEDDINGS, class_embeddings(base, head.labels, head.templates), persistent=False)
    return model


def _embeddings_of(model: torch.nn.Module) -> torch.Tensor | None:
    """The zero-shot head [classes, projection_dim] of a CLIP model in training, which other modules may wrap.

    The result is None if the model has a linear head.
    """
    return next((each for name, each in model.named_buffers() if name.split(".")[-1] == EMBEDDINGS), None)


def _logits(outputs: Any, embeddings: torch.Tensor | None) -> torch.Tensor:
    """Logits [images, classes] in float32 from a model's outputs.

    `outputs` are those of a transformers model, or the tensor that the loss is computed from. `embeddings` are the
    zero-shot head of a CLIP model, whose outputs are embeddings of images; None for a model with a linear head.
    """
    if embeddings is None:
        found: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
        return found.float()
    seen: torch.Tensor = outputs if isinstance(outputs, torch.Tensor) else outputs.image_embeds
    with torch.autocast(seen.device.type, enabled=False):  # logits are up to 100: 16 bits would be coarse
        return linear(normalize(seen.float(), dim=-1), embeddings.to(seen.device, torch.float32))


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
        "templates": data.templates,
        "image": data.image,
        "label": data.label,
    }
    if data.is_on_hub:
        found |= {"split": data.split, "config": data.configuration}
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

    The head of a whole CLIP model is its zero-shot head for the classes of `images`. Raises InvalidModel if the base or
    the model `data.head` should have the head but has none, or if the head is for features of another size than the
    base's. Raises InvalidTask if the classes of a new head or a zero-shot head are not known.
    """
    origin = open_checkpoint(base)
    if has_zero_shot_heads(origin):
        if spec.data.head != BASE_HEAD:
            raise InvalidModel(
                (
                    f"data.head: {spec.data.head}; {base} is a CLIP model, which is trained with the zero-shot head of "
                    f"its own text tower; expected {BASE_HEAD}, or leave it out",
                )
            )
        return zero_shot_head(spec.name, images.classes, spec.data.templates, where=images.where)
    if origin.settings["model_type"] == "clip_vision_model":
        raise InvalidModel(
            (
                f"base: {base} is a vision tower alone; expected a whole CLIP model, whose text tower makes the "
                "zero-shot head",
            )
        )
    if spec.data.templates is not None:
        raise InvalidModel(
            (f"data.templates: are for zero-shot heads of whole CLIP models, which {base} is not; leave them out",)
        )
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
    sizes = [each.settings.get("hidden_size") for each in (origin, checkpoint)]
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
