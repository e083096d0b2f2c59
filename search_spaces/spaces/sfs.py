"""SFS, scales only: the search space of factors on the weights and on the output of each layer of one model.

Su and Geiping, "Fine, I'll Merge It Myself" (2025), section 5.3. The merge is one model with all of its layers in their
order. Each layer has a factor on its weights and a factor on its output. The paper gives no further details. Here the
first factor multiplies the tensors of attention and MLP (biases included, but not norms), and the second multiplies the
residual stream after the layer, as in DIS (field `LayerRecipe.scale`). The last layer's output has no factor, because
the final norm would cancel it.

The range of the factors is the same as in DIS. Merges are differentiable with respect to both factors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from search_spaces.errors import InvalidConfiguration, InvalidStudy, Problem
from search_spaces.parameters import Configuration, Float, Parameters
from search_spaces.recipe import COEFFICIENT_DECIMALS, COMPONENTS, Component, LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.base import ParameterPlace, SearchedModels, SpaceDescription, SpaceSection
from search_spaces.spaces.dis_paths import SCALES
from search_spaces.spaces.layers import one_layer, split_layers, with_own_aliases

__all__ = ["SPACE", "SfsSection", "SfsSpace"]

SCALED: tuple[Component, ...] = ("attention", "mlp")


class SfsSection(SpaceSection):
    kind: Literal["sfs"]
    """sfs: one model with a factor on the weights and one on the output of each layer."""
    model: str | None = None
    """The alias of an expert, or base. Default: the only expert."""

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return ()

    @property
    def scaled_by(self) -> str | None:
        return "kind"

    def place_of(self, parameter: str, *, experts: Sequence[str], num_layers: int) -> ParameterPlace:
        return ParameterPlace(one_layer(int(parameter.split(".")[1])))  # layers.NUMBER.weights or .output

    def contradictions(self) -> Iterator[Problem]:
        yield from ()

    def build(self, models: SearchedModels) -> SfsSpace:
        return SfsSpace(models, self)


SPACE = SfsSection


class SfsSpace:
    """The search space SFS over one model of a study, in which each layer of the model has two factors.

    One factor multiplies the layer's weights, and the other factor multiplies the layer's output. The last layer has no
    factor on its output. The class is immutable and implements the interface `DifferentiableSpace`.
    """

    kind = "sfs"
    method = "passthrough"
    coefficient = "scale"
    fixed: Mapping[str, float] = {}
    seed = None

    def __init__(self, models: SearchedModels, section: SfsSection) -> None:
        """Build the space with the options `section` over one of the models of a study.

        Raises InvalidStudy if there are no experts, if `section` names no model and there are several experts, or if it
        names a model that the study does not have.
        """
        known = (*models.experts, models.base)
        if problems := tuple(_problems(models, section, known)):
            raise InvalidStudy(problems)
        self._models = models
        self._model = section.model or models.experts[0]
        self._weights = tuple(f"layers.{layer}.weights" for layer in range(models.num_layers))
        self._outputs = tuple(f"layers.{layer}.output" for layer in range(models.num_layers - 1))
        names = {**dict.fromkeys(self._weights, "weights"), **dict.fromkeys(self._outputs, "output")}
        ordered = sorted(names, key=lambda name: (int(name.split(".")[1]), names[name] == "output"))
        self.parameters = Parameters((Float(name, *SCALES, default=1.0) for name in ordered), roles=names)

    def describe(self) -> SpaceDescription:
        num_layers = self._models.num_layers
        text = f"{self._model} with a factor on the weights and one on the output of each of {num_layers} layers"
        return SpaceDescription(self.kind, split_layers(num_layers, num_layers), {"layer": COMPONENTS}, text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        models, whole = self._models, Merge("passthrough", (Source(self._model),))
        return Recipe(
            models.fingerprints,
            models.base,
            tuple(self._layer(layer, configuration) for layer in range(models.num_layers)),
            embedding=whole,
            head=whole,
            tokenizer=models.tokenizer,
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models = self._models
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        if renamed is None or len(renamed.layers) != models.num_layers:
            return None
        found: dict[str, float] = {}
        for layer, (name, own) in enumerate(zip(self._weights, renamed.layers, strict=True)):
            merge = own.attention
            if merge.method != "passthrough" or isinstance(merge.coefficients.get("scale"), tuple):
                return None
            found[name] = merge.number("scale")
            if layer < len(self._outputs):
                found[self._outputs[layer]] = own.scale
        configuration = {name: found[name] for name in self.parameters.names}
        try:
            return configuration if self.to_recipe(configuration).digest == recipe.digest else None
        except InvalidConfiguration:  # a factor outside its range
            return None

    def slots(self, tensor_name: str) -> tuple[tuple[str, str], ...]:
        """The parameter whose value is the factor on the tensor `tensor_name`, as a tuple with one pair.

        The pair has the model's alias and the name of the parameter. The result is empty for norms, the embedding and
        the head, which have no factor.
        """
        place = self._models.tensors[self._models.tied.get(tensor_name, tensor_name)]
        if place.layer is None or place.part not in SCALED:
            return ()
        return ((self._model, self._weights[place.layer]),)

    @property
    def layer_scales(self) -> Mapping[int, str]:
        """Name of the parameter that scales a layer's output, keyed by the layer's index.

        The last layer has no such parameter.
        """
        return dict(enumerate(self._outputs))

    def _layer(self, layer: int, configuration: Configuration) -> LayerRecipe:
        source = (Source(self._model, layer),)
        scaled = Merge("passthrough", source, {"scale": configuration[self._weights[layer]]})
        output = configuration[self._outputs[layer]] if layer < len(self._outputs) else 1.0
        norm = Merge("passthrough", source)
        return LayerRecipe(scaled, scaled, norm, scale=round(output, COEFFICIENT_DECIMALS))


def _problems(models: SearchedModels, section: SfsSection, known: tuple[str, ...]) -> Iterator[Problem]:
    if not models.experts:
        yield Problem("models.experts", "there are no experts; name at least one")
    elif section.model is None and len(models.experts) > 1:
        yield Problem("search_space.model", f"is missing; give one of {', '.join(known)}")
    if section.model is not None and section.model not in known:
        message = f"{section.model!r} is not a model of the study; give one of {', '.join(known)}"
        yield Problem("search_space.model", message)
