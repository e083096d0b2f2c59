"""SearchSpace: the interface of every search space, from a configuration to a Recipe; and of its section in a study."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self, TypeAlias, runtime_checkable

from search_spaces.errors import Problem
from search_spaces.parameters import Configuration, Parameters
from search_spaces.recipe import Component, Recipe
from search_spaces.section import Section

__all__ = [
    "AlignedSpace",
    "AlignmentKind",
    "DifferentiableSpace",
    "LayerGroup",
    "LayerPair",
    "LayeredSpace",
    "Part",
    "SearchSpace",
    "SearchedModels",
    "SpaceDescription",
    "SpaceSection",
    "TensorLocation",
    "repeated",
]

Part: TypeAlias = Component | Literal["embedding", "head"]
AlignmentKind: TypeAlias = Literal["none", "moments", "mlp"]
LayerPair: TypeAlias = tuple[tuple[str, int], tuple[str, int]]
"""The layer of a path that hands on, and the one that receives: each a model's name and its layer's number."""


@dataclass(frozen=True)
class TensorLocation:
    """The part of the model that a tensor belongs to: a component of decoder layer `layer` (0-based), or the embedding
    or head (None). `suffix` is its name within the layer, or its whole name outside layers."""

    part: Part
    layer: int | None
    suffix: str


@dataclass(frozen=True, kw_only=True)
class SearchedModels:
    """What a space may know of the models that it merges. Models are named by their aliases.

    `fingerprints` are those of `base` and `experts`; `tensors` are the merged model's, by name and in the order in
    which they are merged: embedding, layer by layer, head. A tied output head is the embedding, and not among them;
    `tied` maps its name, if the base's files have it, to the embedding's. `tokenizer` is every recipe's. `max_layers`
    is how many layers a merge may have, where the study says. `preferences` are the study's preference vectors, weights
    of at least 0 by objective that sum to one: a single one of equal weights where the study has none."""

    base: str
    experts: tuple[str, ...]
    fingerprints: Mapping[str, str]
    num_layers: int
    tensors: Mapping[str, TensorLocation]
    tied: Mapping[str, str] = field(default_factory=dict)
    tokenizer: str = "base"
    max_layers: int | None = None
    preferences: tuple[Mapping[str, float], ...] = ()


@dataclass(frozen=True)
class LayerGroup:
    """Adjacent layers [start, stop) (0-based) that share their coefficients."""

    name: str
    start: int
    stop: int

    @property
    def label(self) -> str:
        """The layers as people count them, from 1: "layers 1-3"."""
        return f"layer {self.stop}" if self.stop - self.start == 1 else f"layers {self.start + 1}-{self.stop}"


@dataclass(frozen=True)
class SpaceDescription:
    """How a space divides the model: for reports.

    `layer_groups` cover the layers in order. `component_groups` are the pieces of a layer with coefficients of their
    own, by name: groups of components, or single tensors by their names within the layer, with the components that
    they belong to. `text` says in words what is searched."""

    kind: str
    layer_groups: tuple[LayerGroup, ...]
    component_groups: Mapping[str, tuple[Component, ...]]
    text: str


class SearchSpace(Protocol):
    """One search space over one family of models. Implementations are immutable and picklable."""

    @property
    def kind(self) -> str:
        """The space's name in a study file."""
        ...

    @property
    def parameters(self) -> Parameters:
        """The searched dimensions; every configuration they accept decodes to a recipe."""
        ...

    def to_recipe(self, configuration: Configuration) -> Recipe:
        """The merge that `configuration` stands for, in canonical form. Equal configurations give equal recipes.

        Raises InvalidConfiguration if `parameters` does not accept it."""
        ...

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        """A configuration that decodes to `recipe` (equal digests), or None where the space does not contain it."""
        ...

    def describe(self) -> SpaceDescription:
        """The division of the model that reports draw."""
        ...


@runtime_checkable
class LayeredSpace(SearchSpace, Protocol):
    """A space whose merges have layers of any number and order."""

    @property
    def max_layers(self) -> int:
        """The most layers that a merge has."""
        ...


@runtime_checkable
class AlignedSpace(LayeredSpace, Protocol):
    """A space of paths through the layers of several models, with alignments between layers that do not follow each
    other in one of them. Its recipes name alignments, so these are learned before the first path is made."""

    @property
    def alignment(self) -> AlignmentKind:
        """What alignments are; "none" where the space has none."""
        ...

    @property
    def pool(self) -> Mapping[str, Recipe]:
        """The models whose layers paths are made of, by the names that `pairs` has."""
        ...

    @property
    def pairs(self) -> tuple[LayerPair, ...]:
        """Every pair of neighbours in a path of the space that an alignment stands between; () without alignments."""
        ...

    def with_alignments(self, names: Mapping[LayerPair, str]) -> Self:
        """The space whose recipes have these alignments (`LayerRecipe.alignment`), one for each of `pairs`."""
        ...


@runtime_checkable
class DifferentiableSpace(SearchSpace, Protocol):
    """A space in which every tensor is merged by one method, and every coefficient is the value of one parameter (a
    number): one for each source, or one that they share. So the derivative of a loss by a parameter is the sum of its
    derivatives by the coefficients that have it."""

    @property
    def method(self) -> str:
        """The merge method of every tensor."""
        ...

    @property
    def coefficient(self) -> str:
        """The method's coefficient that is searched ("lambda")."""
        ...

    @property
    def fixed(self) -> Mapping[str, float]:
        """The method's other coefficients, which are the same in all recipes of the space."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed of the method's random masks; None if it draws none."""
        ...

    def slots(self, tensor_name: str) -> tuple[tuple[str, str], ...]:
        """For each source of the tensor, in a fixed order: its alias, and the parameter that is its coefficient; of a
        coefficient that sources share, the first one's. None for a tensor without a searched coefficient.

        `tensor_name` is a tensor of the merged model, or a tied output head, which has the embedding's parameters.
        Raises KeyError for any other name."""
        ...

    @property
    def layer_scales(self) -> Mapping[int, str]:
        """By layer of the merge, the parameter that is its scale (`LayerRecipe.scale`), where that is searched."""
        ...


class SpaceSection(Section, ABC):
    """The section `search_space` of a study file, for one kind of space."""

    kind: str

    @property
    @abstractmethod
    def merge_methods(self) -> tuple[str, ...]:
        """The merge methods that recipes of the space may use, beside passthrough."""

    @property
    def changes_layers(self) -> bool:
        """Whether merges have layers of any number and order: costs in layers are those of such a space, and a limit
        of layers belongs to it."""
        return False

    @property
    def scaled_by(self) -> str | None:
        """The option by which layers have scales (`LayerRecipe.scale`), which not every model type can have; None if
        they have none."""
        return None

    @abstractmethod
    def contradictions(self) -> Iterator[Problem]:
        """What is wrong between fields that are each valid, found without the models."""

    @abstractmethod
    def build(self, models: SearchedModels) -> SearchSpace:
        """The space over these models. Raises InvalidStudy if it does not fit them."""


def repeated(option: str, values: Sequence[object]) -> Iterator[Problem]:
    """A Problem for each entry of the list `option` of the section that an earlier one equals."""
    for index, value in enumerate(values):
        if value in values[:index]:
            yield Problem(f"search_space.{option}.{index}", f"{value} is given twice")
