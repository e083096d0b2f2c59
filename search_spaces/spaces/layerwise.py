"""Layerwise: a search space with one coefficient for each expert's task vector in each part of the model.

Its merges are task arithmetic (Ilharco et al., "Editing Models with Task Arithmetic", 2022). A part of the model is a
tensor, a component of a layer, a layer or a group of layers. With learned coefficients for each layer this is
AdaMerging's layer-wise form (Yang et al., 2023). The embedding and the head (final norm and untied output head) are
separate parts.

With TIES or DARE, only some elements of the task vectors are added. All configurations have the same masks, which do
not depend on the coefficients. Therefore merged tensors are linear in the coefficients with every method.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import Field

from search_spaces.errors import InvalidConfiguration, InvalidStudy, Problem
from search_spaces.methods import METHODS
from search_spaces.parameters import Configuration, Float, Parameters
from search_spaces.recipe import (
    COEFFICIENT_DECIMALS,
    COMPONENTS,
    Component,
    LayerRecipe,
    Merge,
    Recipe,
    Source,
    Trimming,
)
from search_spaces.spaces.base import (
    ParameterPlace,
    Part,
    SearchedModels,
    SpaceDescription,
    SpaceSection,
    TensorLocation,
)
from search_spaces.spaces.dis_paths import SCALES
from search_spaces.spaces.layers import IN_LAYER, expert_of, one_layer, split_layers, with_own_aliases

__all__ = ["MAX_TENSOR_COEFFICIENTS", "SPACE", "LayerwiseSection", "LayerwiseSpace"]

# The finest granularity gives the best merges, but models with very many tensors (a mixture of many experts in each
# layer) have more coefficients than a search can determine. Above this number, `auto` means component.
MAX_TENSOR_COEFFICIENTS = 10_000

DEFAULT_LAYER_GROUPS = 4
# The beginning of the name of a parameter that is a layer's scale.
SCALE = "scale:"
DEFAULT_SEED = 0
# The share of elements kept: TIES's own default; for DARE the middle of the drop rates that it was tried with.
DEFAULT_DENSITIES = {"ties_peft": 0.2, "dare_linear": 0.5, "dare_linear_l1": 0.5}

Granularity = Literal["tensor", "component", "layer", "layer_group"]
# Methods that are linear in one coefficient per expert, and the name of that coefficient.
COEFFICIENTS = {"task_arithmetic": "lambda", "ties_peft": "weight", "dare_linear": "lambda", "dare_linear_l1": "lambda"}


class LayerwiseSection(SpaceSection):
    kind: Literal["layerwise"] = "layerwise"
    """layerwise: one coefficient for each expert's task vector in each part of the model."""
    granularity: Literal["auto", "tensor", "component", "layer", "layer_group"] = "auto"
    """The parts of the model with coefficients of their own: each tensor, component of a layer (attention, mlp, norm),
    layer or group of layers. auto: tensor, or component if that would be more than 10,000 coefficients.
    """
    layer_groups: Annotated[int, Field(ge=1)] | None = None
    """With granularity: layer_group, the number of groups of adjacent layers. Default: 4."""
    range: tuple[float, float] = (-0.5, 1.5)
    """The lowest and highest coefficient; 0 leaves the base, 1 adds the expert's whole task vector."""
    method: Literal["task_arithmetic", "ties_peft", "dare_linear", "dare_linear_l1"] = "task_arithmetic"
    """Which elements of the task vectors are added: all, those that TIES elects, or those that DARE keeps."""
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of each task vector's elements that TIES and DARE keep. Default: 0.2 for TIES, 0.5 for DARE."""
    trim: Trimming = "tensor"
    """The unit of which TIES keeps the share `density`: each tensor, or the whole model's task vector."""
    mask_seed: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """The seed of DARE's masks. Default: 0."""
    layer_scales: bool = False
    """Whether each layer's output has a factor of its own too, 0.5 to 1.5; the last layer has none."""

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return (self.method,)

    @property
    def scaled_by(self) -> str | None:
        return "layer_scales" if self.layer_scales else None

    def place_of(self, parameter: str, *, experts: Sequence[str], num_layers: int) -> ParameterPlace:
        if parameter.startswith(SCALE):
            return ParameterPlace(one_layer(int(parameter.removeprefix(SCALE))))
        expert = expert_of(parameter, experts)
        piece = parameter if expert is None else parameter.removesuffix(f".{expert}")
        if self.granularity == "layer_group":
            groups = {group.name: group for group in split_layers(num_layers, _num_groups(self))}
            if piece in groups:
                return ParameterPlace(groups[piece], None, expert)
        inside = IN_LAYER.fullmatch(piece)
        if inside is None:
            return ParameterPlace(None, piece.removesuffix(".weight"), expert)
        part = inside["part"] and inside["part"].removesuffix(".weight")
        return ParameterPlace(one_layer(int(inside["layer"])), part, expert)

    def contradictions(self) -> Iterator[Problem]:
        low, high = self.range
        if not low < high:
            yield Problem("search_space.range", f"{list(self.range)} is empty; give [lowest, highest]")
        if self.layer_groups is not None and self.granularity != "layer_group":
            yield Problem(
                "search_space.layer_groups",
                f"has no effect with granularity: {self.granularity}; leave it out, or write granularity: layer_group",
            )
        if self.density is not None and self.method == "task_arithmetic":
            yield Problem("search_space.density", "has no effect with method: task_arithmetic; leave it out")
        if self.trim == "model" and not METHODS[self.method].trims:
            message = f"has no effect with method: {self.method}, which trims no task vectors; leave it out"
            yield Problem("search_space.trim", message)
        if self.mask_seed is not None and not METHODS[self.method].takes_seed:
            message = f"has no effect with method: {self.method}, which draws no masks; leave it out"
            yield Problem("search_space.mask_seed", message)

    def build(self, models: SearchedModels) -> LayerwiseSpace:
        return LayerwiseSpace(models, self)


SPACE = LayerwiseSection


class LayerwiseSpace:
    """The search space `layerwise`: each part of the model has one coefficient for each expert.

    The class is immutable and implements the interface `DifferentiableSpace`.
    """

    kind = "layerwise"

    def __init__(self, models: SearchedModels, section: LayerwiseSection) -> None:
        """Build the space with the options `section` over the models of a study.

        Raises InvalidStudy if there are no experts, or more layer groups than layers.
        """
        self._models = models
        self._granularity = _granularity(section, models)
        self._trim = section.trim
        num_groups = _num_groups(section)
        if self._granularity != "layer_group":
            num_groups = models.num_layers
        if problems := tuple(_problems(models, num_groups)):
            raise InvalidStudy(problems)
        self.method: str = section.method
        self.coefficient = COEFFICIENTS[section.method]
        self.fixed: Mapping[str, float] = {}
        if section.method in DEFAULT_DENSITIES:
            self.fixed = {"density": section.density or DEFAULT_DENSITIES[section.method]}
        seed = DEFAULT_SEED if section.mask_seed is None else section.mask_seed
        self.seed = seed if METHODS[section.method].takes_seed else None
        self._layer_groups = split_layers(models.num_layers, num_groups)
        group_of = {layer: group.name for group in self._layer_groups for layer in range(group.start, group.stop)}
        self._pieces = {name: self._piece(name, place, group_of) for name, place in models.tensors.items()}
        # The first tensor of each part that has tensors; its coefficients are those of the part in a recipe.
        self._first: dict[tuple[Part, int | None], str] = {}
        for name, place in models.tensors.items():
            self._first.setdefault((place.part, place.layer), name)
        # The last layer has no scale: the final norm would cancel it.
        scaled = range(models.num_layers - 1) if section.layer_scales else ()
        self._scales = {layer: f"{SCALE}{layer}" for layer in scaled}
        low, high = section.range
        start = min(max(1 / len(models.experts), low), high)  # the average of the experts
        keys = {
            piece: tuple(f"{piece}.{expert}" for expert in models.experts)
            for piece in dict.fromkeys(self._pieces.values())
        }
        self._keys = keys
        self._sources = {
            layer: tuple(Source(expert, layer) for expert in models.experts)
            for layer in (None, *range(models.num_layers))
        }
        roles = {key: expert for own in keys.values() for key, expert in zip(own, models.experts, strict=True)}
        self.parameters = Parameters(
            chain(
                (Float(key, low, high, default=start) for key in chain.from_iterable(keys.values())),
                (Float(key, *SCALES, default=1.0) for key in self._scales.values()),
            ),
            roles=roles | dict.fromkeys(self._scales.values(), SCALE),
        )

    def describe(self) -> SpaceDescription:
        names = {"component": "component of a layer", "layer_group": f"group of layers ({len(self._layer_groups)})"}
        text = f"{self.method}, one coefficient per expert and {names.get(self._granularity, self._granularity)}"
        text += ", and a scale per layer" if self._scales else ""
        return SpaceDescription(self.kind, self._layer_groups, self._component_groups(), text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        numbers = {piece: tuple(configuration[key] for key in keys) for piece, keys in self._keys.items()}

        def merge(name: str, layer: int | None) -> Merge:
            searched = numbers[self._pieces[name]]
            return Merge(self.method, self._sources[layer], {self.coefficient: searched, **self.fixed}, self.seed)

        parts = {place: merge(name, place[1]) for place, name in self._first.items()}
        single = {}
        if self._granularity == "tensor":
            for name, place in self._models.tensors.items():
                of_part = place.part, place.layer
                if self._first[of_part] != name and (own := merge(name, place.layer)) != parts[of_part]:
                    single[name] = own

        def part(name: Part, layer: int | None = None) -> Merge:
            # A part without tensors has the merge of another part of the same layer, or of another part outside layers.
            return parts.get((name, layer)) or next(own for (_, at), own in parts.items() if at == layer)

        return Recipe(
            self._models.fingerprints,
            self._models.base,
            tuple(
                LayerRecipe(
                    part("attention", layer),
                    part("mlp", layer),
                    part("norm", layer),
                    scale=round(configuration[self._scales[layer]], COEFFICIENT_DECIMALS)
                    if layer in self._scales
                    else 1.0,
                )
                for layer in range(self._models.num_layers)
            ),
            embedding=part("embedding"),
            head=part("head"),
            tensors=single,
            tokenizer=self._models.tokenizer,
            trim=self._trim,
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models = self._models
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        if renamed is None or len(renamed.layers) != models.num_layers:
            return None
        found: dict[str, tuple[float, ...]] = {}
        for name, place in models.tensors.items():
            numbers = self._numbers(_merge_of(renamed, name, place))
            if numbers is None or found.setdefault(self._pieces[name], numbers) != numbers:
                return None
        configuration = {
            key: number for piece, keys in self._keys.items() for key, number in zip(keys, found[piece], strict=True)
        } | {key: renamed.layers[layer].scale for layer, key in self._scales.items()}
        try:
            return configuration if self.to_recipe(configuration).digest == recipe.digest else None
        except InvalidConfiguration:  # a number outside its range
            return None

    def slots(self, tensor_name: str) -> tuple[tuple[str, str], ...]:
        """List the search parameters whose values are the coefficients of the tensor `tensor_name`.

        The result contains a pair for each expert, in the study's order: the expert's alias and the name of the
        parameter.
        """
        piece = self._pieces[self._models.tied.get(tensor_name, tensor_name)]
        return tuple(zip(self._models.experts, self._keys[piece], strict=True))

    @property
    def layer_scales(self) -> Mapping[int, str]:
        """Name of the parameter that scales the residual stream after a layer, keyed by the layer's number.

        The last layer has no scale. Without the option `layer_scales` the mapping is empty.
        """
        return self._scales

    def _piece(self, name: str, place: TensorLocation, group_of: Mapping[int, str]) -> str:
        """Name of the part of the model that has the tensor `name`.

        All tensors of a part share their coefficients. The option `granularity` decides whether a part is a tensor, a
        component of a layer, a layer, or a layer group; the embedding and the head are separate parts. `place` is the
        layer and component of the tensor, and `group_of` has the name of each layer's group, keyed by the layer's
        number.
        """
        if self._granularity == "tensor":
            return name
        if place.layer is None:
            return place.part
        if self._granularity == "layer_group":
            return group_of[place.layer]
        layer = f"layers.{place.layer}"
        return f"{layer}.{place.part}" if self._granularity == "component" else layer

    def _component_groups(self) -> dict[str, tuple[Component, ...]]:
        if self._granularity in ("layer", "layer_group"):
            return {"layer": COMPONENTS}
        if self._granularity == "component":
            return {component: (component,) for component in COMPONENTS}
        in_layers = (place for place in self._models.tensors.values() if place.layer is not None)
        return {p.suffix: (p.part,) for p in in_layers if p.part != "embedding" and p.part != "head"}

    def _numbers(self, merge: Merge) -> tuple[float, ...] | None:
        """The coefficient of each expert in a canonical merge, in the order of the study's experts.

        An expert that the merge leaves out has the coefficient 0. Returns None if the space has no such merge, because
        the merge is by another method or uses a model twice.
        """
        experts = self._models.experts
        models = tuple(source.model for source in merge.sources)
        if merge.method == "passthrough" and not merge.coefficients:
            return tuple(float(expert == models[0]) for expert in experts)
        if merge.method != self.method or len(set(models)) < len(models):
            return None
        own = dict(zip(models, merge.per_source(self.coefficient), strict=True))
        return tuple(own.get(expert, 0.0) for expert in experts)


def _num_groups(section: LayerwiseSection) -> int:
    return DEFAULT_LAYER_GROUPS if section.layer_groups is None else section.layer_groups


def _granularity(section: LayerwiseSection, models: SearchedModels) -> Granularity:
    if section.granularity != "auto":
        return section.granularity
    return "tensor" if len(models.tensors) * len(models.experts) <= MAX_TENSOR_COEFFICIENTS else "component"


def _problems(models: SearchedModels, num_groups: int) -> Iterator[Problem]:
    if not models.experts:
        yield Problem("models.experts", "there are no experts; name at least one")
    if num_groups > models.num_layers:
        message = f"{num_groups} for a model of {models.num_layers} layers; use 1 to {models.num_layers}"
        yield Problem("search_space.layer_groups", message)


def _merge_of(recipe: Recipe, name: str, place: TensorLocation) -> Merge:
    """The merge of the tensor `name` in a recipe; `place` is the tensor's location in the model."""
    if name in recipe.tensors:
        return recipe.tensors[name]
    if place.part == "embedding" or place.part == "head":
        return recipe.embedding if place.part == "embedding" else recipe.head
    assert place.layer is not None
    return recipe.layers[place.layer].component(place.part)
