"""SearchSpace: the interface of every search space, and the section of a study file that describes a space."""

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
"""Two layers that follow each other in a path, each as a model's name and the layer's number in that model."""


@dataclass(frozen=True)
class TensorLocation:
    """The part of the model that a tensor belongs to.

    `part` is a component of decoder layer `layer` (0-based), or the embedding or head (`layer` is None). `suffix` is
    the tensor's name within the layer, or its whole name outside layers.
    """

    part: Part
    layer: int | None
    suffix: str


@dataclass(frozen=True, kw_only=True)
class SearchedModels:
    """The models that a space merges, as far as a space needs to know them. Models are named by their aliases.

    `fingerprints` are those of `base` and `experts`. `tensors` are the merged model's, by name and in the order in
    which they are merged: embedding, layer by layer, head. A tied output head is the embedding and is not among them;
    `tied` maps its name, if the base's files have it, to the embedding's. `tokenizer` is the tokenizer of every recipe.
    `max_layers` is the largest number of layers that a merge may have; None: the study states none. `preferences` are
    the study's preference vectors, weights of at least 0 by objective that sum to one; a study that has none gets a
    single one of equal weights.
    """

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
        """The layers for readers, counted from 1: "layers 1-3"."""
        return f"layer {self.stop}" if self.stop - self.start == 1 else f"layers {self.start + 1}-{self.stop}"


@dataclass(frozen=True)
class SpaceDescription:
    """The division of the model by a space, for reports.

    `layer_groups` cover the layers in order. `component_groups` are the pieces of a layer with coefficients of their
    own, by name: groups of components, or single tensors by their names within the layer, with the components that they
    belong to. `text` says in words what is searched.
    """

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
        """The searched dimensions. Every configuration that they accept decodes to a recipe."""
        ...

    def to_recipe(self, configuration: Configuration) -> Recipe:
        """The merge that `configuration` describes, in canonical form. Equal configurations give equal recipes.

        Raises InvalidConfiguration if `parameters` does not accept it.
        """
        ...

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        """A configuration that decodes to `recipe` (equal digests); None if the space does not contain it."""
        ...

    def describe(self) -> SpaceDescription:
        """The division of the model, for reports."""
        ...


@runtime_checkable
class LayeredSpace(SearchSpace, Protocol):
    """A space whose merges may have any number of layers in any order."""

    @property
    def max_layers(self) -> int:
        """The largest number of layers that a merge has."""
        ...


@runtime_checkable
class AlignedSpace(LayeredSpace, Protocol):
    """A space of paths through layers of several models, with alignments between layers from different places.

    An alignment is applied between two layers that do not follow each other in one model. Recipes name alignments, so
    these are learned before the first path is made.
    """

    @property
    def alignment(self) -> AlignmentKind:
        """The kind of alignments; "none" if the space has none."""
        ...

    @property
    def pool(self) -> Mapping[str, Recipe]:
        """The models whose layers paths consist of, by the names that `pairs` uses."""
        ...

    @property
    def pairs(self) -> tuple[LayerPair, ...]:
        """Every pair of neighbours in a path of the space that needs an alignment; () without alignments."""
        ...

    def with_alignments(self, names: Mapping[LayerPair, str]) -> Self:
        """The space whose recipes have these alignments (`LayerRecipe.alignment`), one for each of `pairs`."""
        ...


@runtime_checkable
class DifferentiableSpace(SearchSpace, Protocol):
    """A space over which a search by gradient is possible.

    Every tensor is merged by one method. Every coefficient is the value of one parameter (a number): one for each
    source, or one that the sources share. So the derivative of a loss with respect to a parameter is the sum of its
    derivatives with respect to the coefficients that have the parameter's value.
    """

    @property
    def method(self) -> str:
        """The merge method by which every tensor is merged."""
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
        """The alias of each source of a tensor, in a fixed order, with the parameter that is its coefficient.

        If the sources share the coefficient, only the first one is listed. A tensor without a searched coefficient has
        an empty tuple. `tensor_name` is a tensor of the merged model, or a tied output head, which has the embedding's
        parameters. Raises KeyError for any other name.
        """
        ...

    @property
    def layer_scales(self) -> Mapping[int, str]:
        """The parameters of searched layer scales (`LayerRecipe.scale`), by layer of the merge."""
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
        """Whether merges may have any number of layers in any order.

        Only such spaces accept costs of the recipe as objectives, and a limit of layers is part of them.
        """
        return False

    @property
    def scaled_by(self) -> str | None:
        """The option that gives layers scales (`LayerRecipe.scale`); None if layers have no scales.

        Not every model type supports scales.
        """
        return None

    @abstractmethod
    def contradictions(self) -> Iterator[Problem]:
        """Problems between fields that are each valid, as far as they are found without the models."""

    @abstractmethod
    def build(self, models: SearchedModels) -> SearchSpace:
        """The search space over the given models. Raises InvalidStudy if the section does not fit them."""


def repeated(option: str, values: Sequence[object]) -> Iterator[Problem]:
    """A Problem for each entry of the section's list `option` that equals an earlier one."""
    for index, value in enumerate(values):
        if value in values[:index]:
            yield Problem(f"search_space.{option}.{index}", f"{value} is given twice")
