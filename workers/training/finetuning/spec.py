"""Specification of a fine-tuning: base model, data, optimizer, schedule, evaluation.

All problems of a specification file are reported together. This module reads neither models nor data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.section import Line, Name, Section
from search_spaces.study.checks import HINTS
from search_spaces.study.file import resolved_file, resolved_model, resolved_objective
from search_spaces.study.image_suites import HUB, IMAGE_SUITES, with_described_suites
from search_spaces.study.objectives import DescribedTask, ObjectiveSpec
from search_spaces.study.validation import in_file_order, problems_of
from search_spaces.study.yaml import read_document
from workers.file_access import FileAccess
from workers.types import TaskSpec

__all__ = [
    "ALL_LINEAR",
    "BASE_HEAD",
    "NEW_HEAD",
    "OF_EXPERTS",
    "Adapter",
    "Data",
    "Evaluation",
    "FinetuneSpec",
    "Method",
    "Training",
    "finetune_json_schema",
    "load_spec",
    "parse_spec",
    "task_of",
]

# Values of `Method.noise` with which offsets are made of experts' task vectors.
OF_EXPERTS = ("task_vectors", "merges")

# The value of `Adapter.targets` and `Method.noise_targets` for all linear modules.
ALL_LINEAR = "all-linear"

# Values of `Data.head` that are no model.
BASE_HEAD, NEW_HEAD = "base", "new"

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


class Data(Section):
    """Training data: a JSONL file (`file`), a dataset (`dataset`) or, for image classifiers, images (`images`)."""

    file: Line | None = None
    """A JSONL file with one object on each line, which has `messages` of a chat, `prompt` and `completion` as lists of
    messages, or the keys that the templates use."""
    dataset: Line | None = None
    """The name of a dataset on the hub, or its directory, in a form that the library datasets accepts."""
    configuration: Line | None = None
    """The configuration (subset) of the dataset, or of a data set of images on the hub. Default: the only or default
    one."""
    split: Line = "train"
    """The split of the dataset, or of a data set of images on the hub, that is used."""
    prompt: Annotated[str, Field(min_length=1)] = "{{prompt}}"
    """Jinja template that makes the prompt from a row's keys."""
    completion: Annotated[str, Field(min_length=1)] = "{{completion}}"
    """Jinja template that makes the completion from a row's keys. The loss counts completions and their end of text; in
    chats, it counts the assistant's messages. It never counts prompts."""
    max_length: Count = 1024
    """The number of tokens of a row. A longer document is an error."""
    chat_bos: bool = True
    """Whether a chat begins with BOS if the tokenizer adds BOS to prompts and the chat template writes none, as in
    evaluations and studies."""
    packing: bool = True
    """Whether a row may have several documents, which do not attend to each other. Models whose layers carry a state
    from document to document are then refused."""
    pad_token: Line | None = None
    """The token with which rows are padded, if the tokenizer has no pad token."""
    images: Line | None = None
    """A folder with a directory of images for each class, or a JSONL file whose lines have an image's path, relative to
    the file's directory, and its label: the name of a class, or the index of an output of the head. Or a data set of
    the hub, as hub:OWNER/NAME, or the name of an image task of the papers, such as clip_eurosat, for its data set,
    classes and templates."""
    classes: Annotated[tuple[Line, ...], Field(min_length=2)] | None = None
    """With images: the names of the classes in the order of the head's outputs. Default: the classes of the head, or,
    with a new head, those of the images in alphabetical order."""
    templates: Annotated[tuple[Line, ...], Field(min_length=1)] | None = None
    """With a whole CLIP model as base: texts that describe a class to its text tower, with {} in place of the class's
    name. Default: "a photo of a {}."."""
    image: Line | None = None
    """With a JSONL file of images: the key of the path. Default: image."""
    label: Line | None = None
    """With a JSONL file of images: the key of the label. Default: label."""
    head: Line = BASE_HEAD
    """With images: the head that maps features to classes. base: that of the base; a directory or hub id: that of this
    model; new: one that begins at 0 and is trained. Other heads stay as they are in training. A whole CLIP model has
    base alone: the zero-shot head that its text tower makes."""

    @property
    def is_on_hub(self) -> bool:
        """Whether the images are a data set of the hub, and not files that the specification names."""
        return self.images is not None and self.images.startswith(HUB)


class Method(Section):
    kind: Literal["mergopt", "adamw", "sgd", "sam", "asam", "tangent"] = "mergopt"
    """The optimizer. mergopt computes gradients at weights to which a merge may move the model; sam and asam are
    sharpness-aware; tangent trains in the tangent space of the base. mergopt, sam, asam and tangent wrap the option
    `optimizer`."""
    optimizer: Literal["adamw", "sgd"] = "adamw"
    """The optimizer that mergopt, sam, asam and tangent wrap."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """The betas of AdamW."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The momentum of SGD."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.001
    """The weight decay of AdamW or SGD. The default is that of the MergOPT paper."""
    noise: Literal["laplace", "gaussian", "task_vectors", "merges"] = "laplace"
    """What mergopt adds to the weights while it computes gradients. laplace, gaussian: noise with this distribution (z
    in the paper). task_vectors: for each weight matrix, z is the task vector of one of the experts in `fit_to`, drawn
    anew for each matrix. merges: the offset of a merge with experts in `fit_to`, without an approximation (the paper's
    equation 5)."""
    scale: Positive | Literal["auto"] = 0.0005
    """The scale of the noise: b of Laplace's distribution, or the standard deviation of the normal distribution. auto:
    fitted to the task vectors of the experts in `fit_to`."""
    mean: Annotated[float, Field(gt=-1, lt=1)] = 0.0
    """The mean of the noise (mu in the paper)."""
    noise_layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The decoder layers to whose weights mergopt adds noise. They should be the layers that merges change. Default:
    all weights; in a fleet whose experts all have `training.layers`, the layers that any of the experts trains. With
    an adapter, see `noise_targets`."""
    noise_targets: Annotated[tuple[Line, ...], Field(min_length=1)] | Literal["all-linear"] | None = None
    """With an adapter: the names of the modules to whose weights mergopt adds noise, or all-linear for all linear
    modules. They should be the modules that merges change. Default: those that the adapter changes; in a fleet whose
    experts all have adapters, those that any of the adapters changes."""
    fit_to: tuple[Line, ...] = ()
    """Experts of the same base. With scale: auto, the noise is fitted to their task vectors. With noise: task_vectors
    or merges, offsets are made of their task vectors, and each expert takes as much memory as the weights."""
    coefficients: Annotated[tuple[float, ...], Field(min_length=1)] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
    """The coefficients of simulated merges, of which mergopt draws one for each update (A in the paper)."""
    max_models: Count = 7
    """The largest number of models in the merges that mergopt simulates (K_max in the paper)."""
    in_layers: bool = False
    """Whether mergopt adds noise where layers read their weights. This needs no copy of the weights, but the noise is
    computed twice."""
    rho: Positive | None = None
    """The radius of sam (default 0.05) or asam (default 0.5), which is the size of the offset for the second
    gradient."""


class Training(Section):
    """Length and settings of a training; the length is given as either `steps` or `epochs`."""

    steps: Count | None = None
    """The number of updates."""
    epochs: Positive | None = None
    """The number of passes over the data."""
    batch: Count = 8
    """The number of rows of one update, over all workers."""
    micro_batch: Count = 8
    """The number of rows in one forward pass of a worker."""
    learning_rate: Positive = 2e-5
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate decays to 0 after the warm-up. constant: it does not decay."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    max_gradient_norm: Positive | None = 1.0
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Whether activations are computed twice, to keep fewer in memory. auto: if they would not fit otherwise."""
    layers: tuple[Annotated[int, Field(ge=0)], ...] | None = None
    """The decoder layers whose weights are trained. Default: all weights of the model."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of activations; weights are float32. auto: bfloat16 on GPU, float32 on CPU."""
    checkpoint_every: Count = 100
    """The number of updates between checkpoints."""


class Adapter(Section):
    """A LoRA adapter (library peft), which is trained in place of the full weights."""

    rank: Count = 16
    alpha: Positive = 32
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: Annotated[tuple[Line, ...], Field(min_length=1)] | Line = "all-linear"
    """The names of the modules that get an adapter, or all-linear for all linear modules."""
    base_precision: Literal["activations", "nf4"] = "activations"
    """The dtype of the base's weights, which are not trained. activations: that of activations. nf4: 4 bits (QLoRA,
    library bitsandbytes) for the linear layers, which are quantised while they are read; the expert is still an adapter
    to the base in full. Not with mergopt, which adds noise to these weights, and not with several workers."""


class Evaluation(Section):
    every: Count = 100
    """The number of updates between evaluations. The model is also evaluated after the last update."""
    samples: Count = 100
    """The number of samples of each objective. They are its first samples in the order of a study with the same
    seed."""
    chat_template: bool | None = None
    """Whether prompts are formatted with the chat template. Default: true if the training data are conversations."""
    objectives: Annotated[tuple[ObjectiveSpec, ...], Field(min_length=1)]


class FinetuneSpec(Section):
    name: Name
    base: Line
    """The model that is fine-tuned: a directory, or a hub id."""
    data: Data
    method: Method = Method()
    training: Training
    adapter: Adapter | None = None
    evaluation: Evaluation | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """The dtype of the expert that is written."""
    workers: Count = 1
    """The number of processes, each with a GPU if there are GPUs. Each holds a shard of weights, gradients and the
    optimizer's state; with the method tangent, each holds all of them."""
    device: Literal["auto", "gpu", "cpu"] = "auto"
    """Where workers train. auto: on GPUs if the cluster has any, else on CPU cores. gpu: it is an error if the cluster
    has fewer GPUs than workers."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0

    @property
    def is_sharded(self) -> bool:
        """Whether each worker holds a shard of the weights, the gradients and the optimizer's state."""
        return self.workers > 1 and self.method.kind != "tangent"

    def canonical(self) -> dict[str, Any]:
        """Convert the specification to plain data, with all defaults.

        The function `parse_spec` returns the same specification from these data.
        """
        return self.model_dump(mode="json")


@cache
def finetune_json_schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a fine-tuning's specification file."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **FinetuneSpec.model_json_schema()}


def load_spec(file: Path | str) -> FinetuneSpec:
    """Read a fine-tuning's specification from a YAML or JSON file.

    Relative paths are relative to the file's directory. Raises InvalidStudy with every problem found.
    """
    file = Path(file)
    return parse_spec(read_document(file), file.absolute().parent)


def parse_spec(document: Mapping[str, Any], directory: Path | None = None) -> FinetuneSpec:
    """Read a fine-tuning's specification from a parsed document.

    Relative paths are relative to `directory`; if `directory` is None, they are left as they are. Raises InvalidStudy
    with every problem found.
    """
    document = _with_described_suites(document)
    try:
        spec = FinetuneSpec.model_validate_json(json.dumps(document), strict=True)
    except ValidationError as error:
        problems = problems_of(error.errors(include_url=False), finetune_json_schema(), HINTS)
        raise InvalidStudy(in_file_order(problems, document)) from error
    if problems := _contradictions(spec):
        raise InvalidStudy(in_file_order(problems, document))
    return spec if directory is None else _resolved(spec, directory)


def task_of(objective: ObjectiveSpec, *, seed: int, access: FileAccess | None = None) -> TaskSpec:
    """Convert an evaluation objective to the specification of its task (TaskSpec).

    `seed` determines the order of the task's samples. `access` limits the files that the task may use; None means no
    limit.
    """
    return TaskSpec(
        task=objective.task.description() if isinstance(objective.task, DescribedTask) else objective.task,
        metric=objective.metric,
        filter=objective.filter,
        split=objective.split,
        num_fewshot=objective.num_fewshot,
        max_tokens=objective.max_tokens,
        until=objective.until,
        permutation_seed=seed,
        access=access,
    )


def _with_described_suites(document: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a specification's `document`, and replace the names of image tasks by what describes them.

    Evaluation tasks become descriptions. As training data, a name stands for the task's data set, its classes and its
    templates; options that the section `data` states are kept.
    """
    found = dict(document)
    if isinstance(found.get("evaluation"), Mapping):
        found["evaluation"] = with_described_suites(found["evaluation"])
    data = found.get("data")
    if isinstance(data, Mapping) and (suite := IMAGE_SUITES.get(str(data.get("images")))) is not None:
        described = suite.description(None)
        options = {"configuration": "config", "classes": "classes", "templates": "templates"}
        stated = {option: described[key] for option, key in options.items() if key in described}
        found["data"] = {**stated, **data, "images": described["images"]}
    return found


def _contradictions(spec: FinetuneSpec) -> list[Problem]:
    found = []
    data, training, method = spec.data, spec.training, spec.method
    if (data.file, data.dataset, data.images).count(None) != 2:
        found.append(Problem("data", "give either file or dataset, or images for a model that reads images"))
    of_images: dict[str, Any] = {"classes": data.classes, "image": data.image, "label": data.label}
    of_images["templates"] = data.templates
    of_images["head"] = None if data.head == BASE_HEAD else data.head
    if data.images is None:
        found += [
            Problem(f"data.{key}", "is for images; leave it out") for key in of_images if of_images[key] is not None
        ]
    if (training.steps is None) == (training.epochs is None):
        found.append(Problem("training", "give either steps or epochs"))
    if training.batch < spec.workers:
        found.append(
            Problem("training.batch", f"{training.batch} rows for {spec.workers} workers; give at least one for each")
        )
    is_of_experts = method.noise in OF_EXPERTS
    if (method.scale == "auto" or is_of_experts) and not method.fit_to:
        option = f"noise: {method.noise}" if is_of_experts else "scale: auto"
        found.append(Problem("method.fit_to", f"is empty; {option} needs experts of the same base"))
    if is_of_experts and (spec.adapter is not None or method.in_layers):
        found.append(
            Problem("method.noise", f"{method.noise} works without adapter and method.in_layers; leave them out")
        )
    if method.noise_layers is not None and spec.adapter is not None:
        found.append(
            Problem("method.noise_layers", "is for full weights; name modules in method.noise_targets, or leave it out")
        )
    if method.noise_targets is not None and spec.adapter is None:
        found.append(
            Problem("method.noise_targets", "is for adapters; name layers in method.noise_layers, or leave it out")
        )
    if method.kind == "tangent" and (
        spec.adapter is not None or method.in_layers or training.gradient_checkpointing is True
    ):
        found.append(
            Problem("method.kind", "tangent works without adapter, method.in_layers and gradient_checkpointing")
        )
    if spec.adapter is not None and spec.adapter.base_precision == "nf4":
        if method.kind == "mergopt":
            found.append(
                Problem(
                    "adapter.base_precision", "nf4 has no weights to which mergopt could add noise; give method adamw"
                )
            )
        if spec.workers > 1:
            found.append(Problem("adapter.base_precision", f"nf4 is not sharded; give workers: 1, not {spec.workers}"))
    if spec.adapter is not None and training.layers is not None:
        found.append(Problem("training.layers", "is for full weights; leave it out, or the adapter"))
    return found


def _resolved(spec: FinetuneSpec, directory: Path) -> FinetuneSpec:
    data = spec.data
    if data.file is not None:
        data = data.model_copy(update={"file": resolved_file(data.file, directory)})
    elif data.dataset is not None:
        data = data.model_copy(update={"dataset": resolved_model(data.dataset, directory)})
    elif data.images is not None:
        head = data.head if data.head in (BASE_HEAD, NEW_HEAD) else resolved_model(data.head, directory)
        images = data.images if data.is_on_hub else resolved_file(data.images, directory)
        data = data.model_copy(update={"images": images, "head": head})
    update: dict[str, Any] = {
        "base": resolved_model(spec.base, directory),
        "data": data,
        "method": spec.method.model_copy(
            update={"fit_to": tuple(resolved_model(expert, directory) for expert in spec.method.fit_to)}
        ),
    }
    if spec.evaluation is not None:
        objectives = tuple(resolved_objective(each, directory) for each in spec.evaluation.objectives)
        update["evaluation"] = spec.evaluation.model_copy(update={"objectives": objectives})
    return spec.model_copy(update=update)
