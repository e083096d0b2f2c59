"""Entries of a study file that define how trials are scored: metrics on tasks (objectives, holdout data), and costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from search_spaces.objectives import Cost
from search_spaces.section import Line, Name, Section, one_of
from search_spaces.study.image_suites import ENTROPY, HUB, IMAGE_SUITES

__all__ = [
    "AnyObjective",
    "CostSpec",
    "DescribedTask",
    "ImageTask",
    "InlineTask",
    "ObjectiveSpec",
    "Rungs",
    "ScoredTask",
]

Rungs = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class DescribedTask(Section, ABC):
    """A task that the study file describes by its data, instead of naming it."""

    @property
    @abstractmethod
    def place(self) -> str:
        """The file or folder with the data: a path, or a URL."""

    @property
    @abstractmethod
    def place_key(self) -> str:
        """The key that names the data in the task's description in a study file, such as "file" or "images"."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """The kind of the task, for messages, such as "a JSONL task"."""

    @property
    def is_on_hub(self) -> bool:
        """Whether the data are a data set of the hub, and not files that the study names."""
        return False

    @property
    def backend(self) -> Literal["vllm", "torch"]:
        """The program that scores the task: the value of the study file's option `engine.backend`."""
        return "vllm"

    @property
    def has_prompts(self) -> bool:
        """Whether samples are prompts for a language model."""
        return True

    @property
    def minimised(self) -> tuple[str, ...]:
        """Names of the task's metrics that are minimised and have a known range, so that no study needs to state it."""
        return ()

    @property
    def part(self) -> str | None:
        """Name of the part of the data that the task uses, such as a split; None if it uses all data."""
        return None

    @property
    def may_be_folder(self) -> bool:
        """Whether the data may be a folder, and not only a file."""
        return False

    def description(self) -> dict[str, Any]:
        """The task as a JSON object, without keys that have no value.

        The description of a task in a stored study therefore stays the same if a later version adds keys.
        """
        return self.model_dump(mode="json", exclude_none=True)

    def at(self, place: str) -> Self:
        """A copy of the task that finds its data at `place`, a path or URL."""
        return self.model_copy(update={self.place_key: place})


class InlineTask(DescribedTask):
    """A task that consists of samples in a JSONL file, each a prompt and an answer.

    A sample is right if the whole greedy completion of the prompt equals the answer, apart from white space around it.
    With `program`, the completion is code, which is inserted into this program. The sample is then right if the program
    runs to its end.
    """

    file: Line
    prompt: Annotated[str, Field(min_length=1)] = "{{prompt}}"
    """The prompt, as a Jinja template over the keys of a line."""
    answer: Annotated[str, Field(min_length=1)] = "{{answer}}"
    """The answer, as a Jinja template over the keys of a line."""
    until: tuple[Annotated[str, Field(min_length=1)], ...] = ("\n",)
    """A completion ends at the first of these strings, or at the end of text."""
    max_tokens: Annotated[int, Field(ge=1)] = 64
    program: Annotated[str, Field(min_length=1)] | None = None
    """A program in Python, as a Jinja template over the keys of a line and `completion`; executed in a sandbox."""
    repeats: Annotated[int, Field(ge=1)] | None = None
    """With program: completions of each prompt, drawn at temperature. Default: 1. The metric pass@k needs k or more."""
    temperature: Annotated[float, Field(gt=0)] | None = None
    """With program: the sampling temperature. Default: greedy decoding."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """With temperature: the probability mass of the tokens that are drawn from. Default: 1."""

    @property
    def place(self) -> str:
        return self.file

    @property
    def place_key(self) -> str:
        return "file"

    @property
    def kind(self) -> str:
        return "a JSONL task"


class ImageTask(DescribedTask):
    """A task of images: a folder, a JSONL file or a hub data set, scored with the head of a source model.

    A head maps an image's features to classes. The metric `acc` is the share of images whose right class has the
    largest logit. The metric `acc_top5` is the share of images whose right class is among the five classes with the
    largest logits. The metric `entropy`, which needs no labels, is the mean entropy of the predicted classes, divided
    by the largest possible entropy.
    """

    images: Line
    """A folder with a directory of images for each class, a JSONL file whose lines name an image and its label, or a
    data set of the hub, as hub:OWNER/NAME. Without labels: a folder of images, or lines without a label.
    """
    split: Line | None = None
    """The split of a data set of the hub, in the notation of the package datasets, such as test[:70%]."""
    config: Line | None = None
    """The configuration of a data set of the hub that has several."""
    head: Name
    """The model whose head scores the task: the alias of an expert, or base. Heads are not merged."""
    classes: Annotated[tuple[Line, ...], Field(min_length=2)] | None = None
    """The names of the classes in the order of the head's outputs. Default: as the head's id2label names them."""
    templates: Annotated[tuple[Line, ...], Field(min_length=1)] | None = None
    """Texts that describe a class to CLIP, with {} in place of its name. Default for CLIP: "a photo of a {}."."""
    image: Line = "image"
    """The key of a JSONL line with the path of the image, relative to the file's directory."""
    label: Line = "label"
    """The key of a JSONL line with the label: the name of a class, or the index of the head's output."""

    @property
    def place(self) -> str:
        return self.images

    @property
    def place_key(self) -> str:
        return "images"

    @property
    def kind(self) -> str:
        return "an image task"

    @property
    def backend(self) -> Literal["vllm", "torch"]:
        return "torch"

    @property
    def has_prompts(self) -> bool:
        return False

    @property
    def minimised(self) -> tuple[str, ...]:
        return (ENTROPY,)

    @property
    def is_on_hub(self) -> bool:
        return self.images.startswith(HUB)

    @property
    def part(self) -> str | None:
        return self.split

    @property
    def may_be_folder(self) -> bool:
        return True

    @model_validator(mode="after")
    def _splits_are_of_data_sets(self) -> Self:
        if self.is_on_hub and self.split is None:
            raise ValueError(f"{self.images} has no split; name the split to score, such as `split: test`")
        for key in ("split", "config"):
            if not self.is_on_hub and getattr(self, key) is not None:
                stated = f"{key} is {getattr(self, key)!r} and images {self.images!r}"
                raise ValueError(f"{stated}; only data sets of the hub ({HUB}OWNER/NAME) have a {key}: leave it out")
        return self


def _tag_of_task(value: object) -> str | None:
    if isinstance(value, str):
        return "<name>"
    if isinstance(value, ImageTask) or (isinstance(value, Mapping) and "images" in value):
        return "<images>"
    return "<inline>" if isinstance(value, Mapping | InlineTask) else None


class ScoredTask(Section):
    """A task, the metric that is computed on its samples, and the name that the user gives to the metric's values."""

    name: Name
    task: Annotated[
        Annotated[Line, Tag("<name>")] | Annotated[InlineTask, Tag("<inline>")] | Annotated[ImageTask, Tag("<images>")],
        one_of(_tag_of_task, "the name of an lm-eval task, a YAML file or {file: data.jsonl}"),
        Field(examples=list(IMAGE_SUITES)),
    ]
    """An lm-eval task's name, an lm-eval YAML file, a JSONL file written inline, or images with labels."""
    metric: Line
    filter: Line | None = None
    """The task's filter that is used; required if the task has several."""
    split: Line | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The longest completion of an lm-eval task, in tokens. Default: the task's, or 256."""
    until: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] | None = None
    """A completion of an lm-eval task ends at the first of these strings. Default: the task's."""
    direction: Literal["maximize", "minimize"] | None = None
    """The direction of optimisation. Default: as the task's metric says."""
    range: tuple[float, float] | None = None
    """The metric's lowest and highest value, if these are not 0 and 1."""


class ObjectiveSpec(ScoredTask):
    rungs: Rungs | None = None
    """The number of samples of this objective at each rung, in place of those of fidelity; the number of rungs is the
    same. It may stop growing ([100, 300, 300]) where another objective's grows.
    """


class CostSpec(Section):
    """An objective that is a cost of the merged model, such as its number of layers; less is better.

    A cost needs no data, because its value follows from the recipe.
    """

    name: Name
    cost: Cost
    """The cost of a merge, in spaces that change it: its number of layers, or its number of parameters."""


def _tag_of_objective(value: object) -> str:
    is_cost = isinstance(value, CostSpec) or (isinstance(value, Mapping) and "cost" in value)
    return "<cost>" if is_cost else "<task>"


if TYPE_CHECKING:
    AnyObjective = ObjectiveSpec | CostSpec
else:
    AnyObjective = Annotated[
        Annotated[ObjectiveSpec, Tag("<task>")] | Annotated[CostSpec, Tag("<cost>")], Discriminator(_tag_of_objective)
    ]
