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
    "Coefficients",
    "DifferentiableSpace",
    "LayerGroup",
    "LayerPair",
    "LayeredSpace",
    "ParameterPlace",
    "Part",
    "RefinableSpace",
    "SearchSpace",
    "SearchedModels",
    "SpaceDescription",
    "SpaceSection",
    "TensorLocation",
    "repeated",
]

Part: TypeAlias = Component | Literal["embedding", "head"]
AlignmentKind: TypeAlias = Literal["none", "moments", "mlp", "ridge"]
LayerPair: TypeAlias = tuple[tuple[str, int], tuple[str, int]]
"""Two layers that follow each other in a path, each as a model's name and the layer's number in that model."""


@dataclass(frozen=True)
class TensorLocation:
    """The part of the model that a tensor belongs to.

    `part` is a component of decoder layer `layer` (0-based), or the embedding or the head; for embedding and head,
    `layer` is None. `suffix` is the tensor's name within its layer; outside layers it is the whole name.
    """

    part: Part
    layer: int | None
    suffix: str


@dataclass(frozen=True, kw_only=True)
class SearchedModels:
    """The properties of the models to merge, from which a search space is built.

    Models are named by their aliases.

    - `fingerprints`: the content fingerprints of `base` and `experts`
    - `tensors`: the merged model's tensors, keyed by name, in the order in which they are merged: embedding, layers in
      ascending order, head. An output head that is tied to the embedding is not included.
    - `tied`: for a base whose output head is tied to the embedding but is stored in its files as well: a mapping from
      the name of the head to that of the embedding; otherwise empty
    - `tokenizer`: the tokenizer of every recipe
    - `max_layers`: the largest number of layers that a merge may have, or None if the study states no limit
    - `preferences`: the study's preference vectors: weights of at least 0, keyed by objective, that sum to one. A study
      without preference vectors has a single vector of equal weights.
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
        """The group's layers as text for readers, counted from 1, such as "layers 1-3"."""
        return f"layer {self.stop}" if self.stop - self.start == 1 else f"layers {self.start + 1}-{self.stop}"


@dataclass(frozen=True)
class ParameterPlace:
    """The part of a merge that one searched parameter changes.

    - `layers`: the layer or layer group that it changes; None if it is not confined to one
    - `part`: the component group that it changes, such as attention, or a tensor, or a part outside of layers, such as
      the embedding; None if it is not confined to one
    - `expert`: the alias of the model whose share it changes; None if it changes no share, or several
    """

    layers: LayerGroup | None = None
    part: str | None = None
    expert: str | None = None


@dataclass(frozen=True)
class SpaceDescription:
    """The description of a search space in reports, with the parts of the model that have separate coefficients.

    - `layer_groups`: groups of adjacent layers, which cover the layers in order
    - `component_groups`: the parts of a layer that have separate coefficients; maps the name of a part to the
      components (attention, MLP, norms) that it consists of, or to the one component of which it is a piece
    - `text`: a description of the searched parameters, in words
    """

    kind: str
    layer_groups: tuple[LayerGroup, ...]
    component_groups: Mapping[str, tuple[Component, ...]]
    text: str


class SearchSpace(Protocol):
    """A search space over a base model and its experts; it decodes each configuration to the recipe of a merge.

    Implementations are immutable and picklable.
    """

    @property
    def kind(self) -> str:
        """The space's name in a study file, the value of the option `kind`."""
        ...

    @property
    def parameters(self) -> Parameters:
        """The searched parameters of the space; every configuration that they accept decodes to a recipe."""
        ...

    def to_recipe(self, configuration: Configuration) -> Recipe:
        """The recipe of the merge that `configuration` describes, in canonical form.

        Equal configurations give equal recipes. Raises InvalidConfiguration if `configuration` does not belong to the
        space.
        """
        ...

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        """Find a configuration that decodes to the merge of `recipe`; None if the space has no such configuration."""
        ...

    def describe(self) -> SpaceDescription:
        """Describe, for reports, the parts of the model that have separate coefficients in this space."""
        ...


@runtime_checkable
class LayeredSpace(SearchSpace, Protocol):
    """A search space whose merges may have any number of layers in any order."""

    @property
    def max_layers(self) -> int:
        """The largest number of layers that a merge in this space may have."""
        ...


@runtime_checkable
class AlignedSpace(LayeredSpace, Protocol):
    """A search space of layer paths (sequences of layers of several models) with alignments between layers.

    An alignment is a map of the residual stream. It is applied between two layers that do not follow each other in one
    model. Recipes name their alignments, so all alignments are learned before the first path is proposed.
    """

    @property
    def alignment(self) -> AlignmentKind:
        """The kind of alignments that the space uses, or "none".

        An alignment is a map from the residual stream after one layer to the stream before the next layer of a merge.
        """
        ...

    @property
    def pool(self) -> Mapping[str, Recipe]:
        """The models that provide layers for paths, each as a recipe, keyed by name.

        A recipe of the pool is one source model unchanged, or a merge of source models. A path is the sequence of the
        layers of a merge. The property `pairs`, which lists pairs of layers, uses the same names.
        """
        ...

    @property
    def pairs(self) -> tuple[LayerPair, ...]:
        """Every pair of layers that may follow each other in a path and then need an alignment between them.

        A path is the sequence of the layers of a merge. An alignment is a map from the residual stream after the pair's
        first layer to the stream before its second layer. A layer is given as a model's name in the property `pool` and
        the layer's number in this model. The result is empty if the space uses no alignments.
        """
        ...

    def with_alignments(self, names: Mapping[LayerPair, str]) -> Self:
        """A copy of the search space whose recipes use learned alignments.

        An alignment is a map from the residual stream after one layer to the stream before the next layer of a merge.
        `names` has, for each pair of layers in the property `pairs`, the name of the alignment between them. Recipes
        state this name in the field `LayerRecipe.alignment`.
        """
        ...


class Coefficients(Protocol):
    """Merge coefficients for gradient descent, as the values of numeric parameters.

    Losses are differentiable with respect to the coefficients. Every coefficient is the value of one parameter, and
    several coefficients may have the value of the same parameter. A tensor has one coefficient for each source, or a
    single coefficient for all sources. The derivative of a loss with respect to a parameter is the sum of the
    derivatives with respect to all coefficients that have the parameter's value.
    """

    @property
    def parameters(self) -> Parameters:
        """The search parameters, all numeric, whose values are the merge coefficients."""
        ...

    @property
    def method(self) -> str:
        """The name of a merge method that has the searched coefficient.

        A recipe leaves out a coefficient that has its default; the declaration of this method gives the default. If
        tensors are merged by several methods, the result is one of them; the default is the same for all.
        """
        ...

    @property
    def coefficient(self) -> str:
        """The name that the method `method` gives to its searched coefficient, such as "lambda"."""
        ...

    def to_recipe(self, configuration: Configuration) -> Recipe:
        """The recipe of the merge whose coefficients are the values in `configuration`, in canonical form.

        Raises InvalidConfiguration if `configuration` does not have a value in its range for every parameter.
        """
        ...

    def slots(self, tensor_name: str) -> tuple[tuple[str, str], ...]:
        """List the parameters whose values are the coefficients of the tensor `tensor_name`.

        The result contains pairs of a source's alias and the name of the parameter with the source's coefficient. If
        the sources share the coefficient, only the first source is listed. The result is empty for a tensor without a
        searched coefficient. `tensor_name` is the name of a tensor of the merged model. It may also be the name of an
        output head that is tied to the embedding; the result is then the result for the embedding. Raises KeyError for
        any other name.
        """
        ...

    @property
    def layer_scales(self) -> Mapping[int, str]:
        """Name of the parameter that scales the residual stream after a layer, keyed by the layer's index.

        The scale is the field `LayerRecipe.scale`. Layers whose scale is not searched are missing.
        """
        ...


@runtime_checkable
class DifferentiableSpace(Coefficients, SearchSpace, Protocol):
    """A search space for gradient descent, in which one merge method, `method`, merges all tensors."""

    @property
    def fixed(self) -> Mapping[str, float]:
        """The values of the method's coefficients that are not searched, the same in all recipes of the space."""
        ...

    @property
    def seed(self) -> int | None:
        """The seed of the method's random masks, or None if the method draws no masks."""
        ...


@runtime_checkable
class RefinableSpace(LayeredSpace, Protocol):
    """A search space of layer paths whose merge coefficients gradient descent can optimise, once a path is chosen.

    A layer path is a sequence of layers of several models.
    """

    def coefficients_of(self, recipe: Recipe) -> Coefficients:
        """The coefficients of the merges that `recipe` states, as numeric parameters for gradient descent.

        `recipe` describes one layer path (sequence of layers of several models) of this space. The parameters' defaults
        give `recipe` itself.
        """
        ...


class SpaceSection(Section, ABC):
    """The section `search_space` of a study file; each kind of space has a subclass with its options."""

    kind: str

    @property
    @abstractmethod
    def merge_methods(self) -> tuple[str, ...]:
        """The merge methods that recipes of the space may use, besides passthrough (an unchanged copy of a model)."""

    @property
    def changes_layers(self) -> bool:
        """Whether merges may have any number of layers in any order.

        Only such spaces accept costs of the recipe (its number of layers or parameters) as objectives. In such a space,
        the limit of layers is part of the space.
        """
        return False

    @property
    def has_directions(self) -> bool:
        """Whether the space merges all tensors in the same way, so that each expert has a single share in a merge.

        The function `search_spaces.directions.direction_of` reads the shares from a recipe.
        """
        return False

    @property
    def scaled_by(self) -> str | None:
        """Name of the study file's option that gives layers scales; None if recipes of this space have no scales.

        A layer scale is a factor on the residual stream after a layer (field `LayerRecipe.scale`). Not every model type
        supports layer scales.
        """
        return None

    def place_of(self, parameter: str, *, experts: Sequence[str], num_layers: int) -> ParameterPlace:
        """Find the part of the merge that the search parameter named `parameter` changes.

        `parameter` is the name, `experts` are the aliases of the study's experts, and the base has `num_layers` layers.
        """
        return ParameterPlace()

    @abstractmethod
    def contradictions(self) -> Iterator[Problem]:
        """Yield the contradictions between options of the section that can be found without the models."""

    @abstractmethod
    def build(self, models: SearchedModels) -> SearchSpace:
        """Build the search space over the given models, with the options of this section.

        Raises InvalidStudy if the options do not fit the models.
        """


def repeated(option: str, values: Sequence[object]) -> Iterator[Problem]:
    """Yield a problem for each repeated entry of a list in the section `search_space`.

    `option` is the name of the list, and `values` are its entries.
    """
    for index, value in enumerate(values):
        if value in values[:index]:
            yield Problem(f"search_space.{option}.{index}", f"{value} is given twice")
