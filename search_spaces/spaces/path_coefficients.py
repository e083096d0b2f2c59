"""Coefficients along a layer path: each layer of the path becomes a merge of the same layer of several models.

This is the parameter level of HM3 ("HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models", equation
1b): the weights of step t are a merge of layer l_t of all models with the same base. The layers are those of a path
that a search has found. With the default coefficients, the merge is this path:

- A layer of an expert becomes task arithmetic. By default the coefficient of this expert is 1, and those of all other
  experts are 0. For a layer of the base, all coefficients are 0 by default.
- A layer that is already a merge keeps its method, with its own coefficients as defaults: one for each source or, if
  the method has no weights, a single strength.

Each component of a layer (attention, MLP, norms), the embedding and the head have separate coefficients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from search_spaces.methods import METHODS
from search_spaces.parameters import Configuration, Float, Parameters
from search_spaces.recipe import COEFFICIENT_DECIMALS, COMPONENTS, Merge, Recipe, Source
from search_spaces.spaces.base import Part, SearchedModels

__all__ = ["PathCoefficients"]

# The range of an expert's coefficient in task arithmetic: that of the space `layerwise`.
LAMBDAS = (-0.5, 1.5)

# The range of an expert's weight where methods divide by the sum of weights. A weight of 0 would leave the expert out,
# which changes the merge abruptly where no other expert takes part.
WEIGHTS = (0.01, 1.0)

# The range of one strength for all experts.
STRENGTHS = (0.0, 2.0)


@dataclass(frozen=True)
class _Piece:
    """One merge in a recipe, such as the merge of a layer's attention, with the parameters that a search varies in it.

    The search varies one coefficient of the merge, whose name is `coefficient`. `names` are the names of the
    parameters: one for each source or, if all sources share one number, a single name.
    """

    merge: Merge
    coefficient: str
    names: tuple[str, ...]

    @property
    def has_weights(self) -> bool:
        """Whether each source of the merge has its own coefficient; otherwise all sources share one coefficient."""
        return isinstance(self.merge.coefficients[self.coefficient], tuple)

    def with_values(self, configuration: Configuration) -> Merge:
        values = tuple(float(configuration[name]) for name in self.names)
        found = values if self.has_weights else values[0]
        return replace(self.merge, coefficients={**self.merge.coefficients, self.coefficient: found})

    @property
    def slots(self) -> tuple[tuple[str, str], ...]:
        aliases = [source.model for source in self.merge.sources]
        return tuple(zip(aliases, self.names, strict=False))


class PathCoefficients:
    """The coefficients of the merges along one layer path, as numeric parameters for gradient descent.

    A layer path is a sequence of layers of several models; `recipe` describes the merge that has these layers. The
    class is immutable and implements the interface `Coefficients`. A part of the model that the recipe takes unchanged
    from a model, or merges by task arithmetic, has a coefficient for each of `experts`. A part with another merge
    method has the method's own coefficients. If `scale_range` (the lowest and the highest scale) is given, the scales
    of all layers except the last are also parameters.
    """

    # Coefficients by source are left out of recipes where they are 0, as those of task arithmetic are.
    method = "task_arithmetic"
    coefficient = "lambda"

    def __init__(
        self,
        models: SearchedModels,
        recipe: Recipe,
        *,
        experts: Sequence[str],
        scale_range: tuple[float, float] | None = None,
    ) -> None:
        self._models = models
        self._recipe = replace(recipe, models=models.fingerprints)
        found: dict[tuple[Part, int | None], _Piece] = {}
        ranges: dict[str, tuple[float, float, float]] = {}
        places: list[tuple[Part, int | None, str, Merge]] = [("embedding", None, "embedding", recipe.embedding)]
        places += [
            (component, index, f"layer{index + 1}.{component}", layer.component(component))
            for index, layer in enumerate(recipe.layers)
            for component in COMPONENTS
        ]
        places.append(("head", None, "head", recipe.head))
        for part, index, name, merge in places:
            piece, low, high = _piece(merge, name, experts)
            found[part, index] = piece
            begin = piece.merge.coefficients[piece.coefficient]
            for key, value in zip(piece.names, begin if isinstance(begin, tuple) else (begin,), strict=True):
                ranges[key] = (min(low, value), max(high, value), value)
        scaled = range(len(recipe.layers) - 1) if scale_range is not None else ()
        self._scales = {index: f"layer{index + 1}.scale" for index in scaled}
        if scale_range is not None:
            ranges |= {name: (*scale_range, recipe.layers[index].scale) for index, name in self._scales.items()}
        self._pieces = found
        self.parameters = Parameters(Float(name, low, high, default=at) for name, (low, high, at) in ranges.items())
        self._outside = {name: place.part for name, place in models.tensors.items() if place.layer is None}
        self._inside = {place.suffix: place.part for place in models.tensors.values() if place.layer is not None}
        name, first = next((name, place) for name, place in models.tensors.items() if place.layer is not None)
        self._prefix = name.removesuffix(f"{first.layer}.{first.suffix}")

    @property
    def layer_scales(self) -> dict[int, str]:
        return self._scales

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        merges = {place: piece.with_values(configuration) for place, piece in self._pieces.items()}
        layers = []
        for index, layer in enumerate(self._recipe.layers):
            attention, mlp, norm = (merges[component, index] for component in COMPONENTS)
            scale = layer.scale
            if index in self._scales:
                scale = round(configuration[self._scales[index]], COEFFICIENT_DECIMALS)
            layers.append(replace(layer, attention=attention, mlp=mlp, norm=norm, scale=scale))
        embedding, head = merges["embedding", None], merges["head", None]
        return replace(self._recipe, layers=tuple(layers), embedding=embedding, head=head).canonical()

    def slots(self, tensor_name: str) -> tuple[tuple[str, str], ...]:
        name = self._models.tied.get(tensor_name, tensor_name)
        if name in self._outside:
            return self._pieces[self._outside[name], None].slots
        number, _, suffix = name.removeprefix(self._prefix).partition(".")
        return self._pieces[self._inside[suffix], int(number)].slots


def _piece(merge: Merge, name: str, experts: Sequence[str]) -> tuple[_Piece, float, float]:
    """Choose the search parameters for the coefficients of one merge, and the range [lowest, highest] of their values.

    The first result is a merge with the names of its parameters; the other two are the ends of the range. If `merge` is
    an unchanged model or task arithmetic, the first result is task arithmetic of all `experts`, with a parameter for
    each expert, so that a search can add any expert's task vector to any layer. Otherwise the first result is `merge`
    itself, with a parameter for each source or, if its method has no weights that gradients can change, one parameter
    for its strength.

    `name` is the part of the model, such as "layer1.mlp"; the names of the parameters begin with it. `merge` is in
    canonical form, and all its sources are in the same layer. If its own coefficients are outside of the range, the
    caller extends the range.
    """
    if merge.method in ("passthrough", "task_arithmetic"):
        layer = merge.sources[0].layer
        known = dict.fromkeys((source.model for source in merge.sources), 1.0)
        if merge.method == "task_arithmetic":
            known = dict(zip(known, merge.per_source("lambda"), strict=True))
        lambdas = tuple(known.get(expert, 0.0) for expert in experts)
        whole = Merge("task_arithmetic", tuple(Source(expert, layer) for expert in experts), {"lambda": lambdas})
        return _Piece(whole, "lambda", tuple(f"{name}.{expert}" for expert in experts)), *LAMBDAS
    by_source = [c.name for c in METHODS[merge.method].gradients_by if c.per_model]
    if by_source:
        coefficient = by_source[0]
        stated = replace(merge, coefficients={**merge.coefficients, coefficient: tuple(merge.per_source(coefficient))})
        names = tuple(f"{name}.{source.model}" for source in merge.sources)
        return _Piece(stated, coefficient, names), *WEIGHTS
    strength = METHODS[merge.method].gradients_by[0].name
    stated = replace(merge, coefficients={**merge.coefficients, strength: merge.number(strength)})
    return _Piece(stated, strength, (f"{name}.strength",)), *STRENGTHS
