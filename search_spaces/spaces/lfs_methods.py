"""The merge methods published with LFS (layer-wise fusion): their parameters, and the conversion to a Merge and back.

The module `lfs_ranges` has all other methods. The ranges of parameters are in the declarations of the methods (package
`search_spaces.methods`). Merges in this module have no layer; the module `lfs` adds the layer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from search_spaces.methods import METHODS
from search_spaces.parameters import Condition, Configuration, Float, Parameter
from search_spaces.recipe import COEFFICIENT_DECIMALS, Merge, Source

__all__ = ["DIRECTED", "PUBLISHED", "ComponentGroup", "SearchedMethod", "on_simplex"]

# The share k of TIES in a configuration whose recipe does not determine it (lambda = 0): the paper's default.
DEFAULT_DENSITY = 0.2


@dataclass(frozen=True)
class ComponentGroup:
    """A component group, such as attention, in one layer group: the smallest unit with separate coefficients.

    All tensors of the unit share their coefficients.

    - `conditions`: the object is made for one merge method; these are the conditions on parameters under which a
      configuration chooses this method, or () if the space has no other method
    - `is_selected`: for each expert, the conditions on parameters under which the expert is merged
    """

    name: str
    base: str
    experts: tuple[str, ...]
    conditions: tuple[Condition, ...]
    is_selected: Mapping[str, tuple[Condition, ...]]


class SearchedMethod(Protocol):
    """A merge method in LFS: its searched parameters, and the conversion of their values to a merge and back.

    In the methods of this class, `cell` is the component group of a layer group, such as attention in layers 1 to 8,
    that is merged, and `operands` are the aliases of the models that are merged.
    """

    @property
    def name(self) -> str: ...

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]: ...

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge: ...

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        """Parameter values that make the method produce `merge` from `operands`; None if no values do.

        `cell` is the part of the model that is merged, a component group (such as attention) of a layer group.
        `operands` are the aliases of the models that are merged. `merge` is in canonical form.
        """
        ...


class TaskArithmetic:
    """Task arithmetic in LFS: base + lambda * (sum of the task vectors).

    The selected experts share lambda.
    """

    name = "task_arithmetic"

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return (_searched(cell, self.name, "lambda"),)

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        return _merge(self.name, operands, {"lambda": configuration[f"{cell.name}.task_arithmetic.lambda"]})

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        key = f"{cell.name}.task_arithmetic.lambda"
        if (only := _passed_through(merge)) is not None:
            return {key: 0.0} if only == cell.base else {key: 1.0} if operands == (only,) else None
        value = merge.coefficients.get("lambda")
        if merge.method != self.name or set(_models(merge)) != set(operands) or not isinstance(value, float):
            return None
        return {key: value}


class DirectedTaskArithmetic:
    """Task arithmetic with a weight for each of m experts: base + lambda * m * (weighted mean of task vectors).

    The m task vectors belong to the selected experts. Their weights, which sum to one, are the direction; lambda * m is
    the scale. With equal weights, the merge is the same as by the class TaskArithmetic with the same lambda. Direction
    and scale are searched separately, as in Mixup Model Merge (M3), section 3.1.
    """

    name = "task_arithmetic"

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        weights = (
            Float(self._key(cell, expert), 0.0, 1.0, conditions=cell.conditions + cell.is_selected[expert])
            for expert in (cell.experts if len(cell.experts) > 1 else ())
        )
        return (_searched(cell, self.name, "lambda"), *weights)

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        scale = configuration[f"{cell.name}.task_arithmetic.lambda"] * len(operands)
        weights = on_simplex(tuple(configuration.get(self._key(cell, expert), 0.0) for expert in operands))
        return _merge(self.name, operands, {"lambda": tuple(scale * weight for weight in weights)})

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        if (only := _passed_through(merge)) is not None:
            lambdas = {} if only == cell.base else {only: 1.0}
        elif merge.method == self.name:
            lambdas = dict(zip(_models(merge), merge.per_source("lambda"), strict=True))
        else:
            return None
        if not set(lambdas) <= set(operands) or min(lambdas.values(), default=0.0) < 0:
            return None
        scale, high = math.fsum(lambdas.values()), METHODS[self.name].range_of("lambda").high
        if scale / len(operands) > high + 10.0**-COEFFICIENT_DECIMALS:
            return None  # more experts are selected than have a weight
        values = {f"{cell.name}.task_arithmetic.lambda": min(scale / len(operands), high)}
        if len(cell.experts) > 1:
            values |= {self._key(cell, e): lambdas.get(e, 0.0) / scale if scale else 1.0 for e in operands}
        return values

    def _key(self, cell: ComponentGroup, expert: str) -> str:
        return f"{cell.name}.task_arithmetic.weight.{expert}"


class Ties:
    """TIES-merging of the selected experts in LFS.

    The method keeps the share k of each task vector's elements with the largest magnitudes, elects a sign for each
    element, and adds lambda times the mean of the elements that have this sign.
    """

    name = "ties"

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return _searched(cell, self.name, "lambda"), _searched(cell, self.name, "k")

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        values = {name: configuration[f"{cell.name}.ties.{name}"] for name in ("lambda", "k")}
        return _merge(self.name, operands, values)

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        lambda_key, k_key = f"{cell.name}.ties.lambda", f"{cell.name}.ties.k"
        if _passed_through(merge) == cell.base:
            return {lambda_key: 0.0, k_key: DEFAULT_DENSITY}
        if merge.method != self.name or set(_models(merge)) != set(operands):
            return None
        return {lambda_key: merge.number("lambda"), k_key: merge.number("k")}


class Linear:
    """The weighted mean of the selected experts in LFS; the weights sum to one.

    Each expert has a parameter, which exists only in configurations that select the expert. With several experts, the
    weights are the parameters' values divided by their sum; if all values are zero, the weights are equal. A single
    expert is averaged with the base: the expert's weight is its parameter's value w, and the base's weight is 1 - w. If
    a configuration selects no expert, all experts are merged with equal weights.
    """

    name = "linear"

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        weights = METHODS[self.name].range_of("weight")
        return tuple(
            Float(
                self._key(cell, expert),
                weights.low,
                weights.high,
                conditions=cell.conditions + cell.is_selected[expert],
            )
            for expert in cell.experts
        )

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        searched = tuple(configuration.get(self._key(cell, expert), 0.0) for expert in operands)
        if len(operands) == 1:
            return _merge(self.name, (cell.base, *operands), {"weight": (1 - searched[0], searched[0])})
        return _merge(self.name, operands, {"weight": on_simplex(searched)})

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        if (only := _passed_through(merge)) is not None:
            weights = {only: 1.0}
        elif merge.method == self.name:
            weights = dict(zip(_models(merge), merge.per_source("weight"), strict=True))
        else:
            return None
        allowed = {cell.base, *operands} if len(operands) == 1 else set(operands)
        if not set(weights) <= allowed or not _is_on_simplex(tuple(weights.values())):
            return None
        return {self._key(cell, expert): weights.get(expert, 0.0) for expert in operands}

    def _key(self, cell: ComponentGroup, expert: str) -> str:
        return f"{cell.name}.linear.weight.{expert}"


class Slerp:
    """Spherical interpolation between the two models of a pair in LFS.

    The parameter t = 0 gives the first model, and t = 1 gives the second model.
    """

    name = "slerp"

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return (_searched(cell, self.name, "t"),)

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        return _merge(self.name, operands, {"t": configuration[f"{cell.name}.slerp.t"]})

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        key = f"{cell.name}.slerp.t"
        if (only := _passed_through(merge)) is not None:
            return {key: float(operands.index(only))} if only in operands else None
        if merge.method != self.name or set(_models(merge)) != set(operands):
            return None
        t = merge.number("t")
        return {key: t if _models(merge) == operands else round(1 - t, COEFFICIENT_DECIMALS)}


# In the order in which methods are searched, and tried when a recipe is encoded.
PUBLISHED: dict[str, SearchedMethod] = {method.name: method for method in (TaskArithmetic(), Ties(), Slerp(), Linear())}

# Task arithmetic with a lambda per expert, instead of the published one.
DIRECTED = DirectedTaskArithmetic()


def _searched(cell: ComponentGroup, method: str, coefficient: str) -> Float:
    """Make the search parameter for a coefficient of a merge method in one part of the model.

    `cell` is the part, a component group (such as attention) of a layer group. The parameter is one number for all
    merged models, in the range that the method declares.
    """
    range_ = METHODS[method].range_of(coefficient)
    return Float(f"{cell.name}.{method}.{coefficient}", range_.low, range_.high, conditions=cell.conditions)


def _merge(method: str, models: tuple[str, ...], coefficients: dict[str, float | tuple[float, ...]]) -> Merge:
    return Merge(method, tuple(Source(model) for model in models), coefficients)


def _models(merge: Merge) -> tuple[str, ...]:
    return tuple(source.model for source in merge.sources)


def _passed_through(merge: Merge) -> str | None:
    is_plain = merge.method == "passthrough" and not merge.coefficients
    return merge.sources[0].model if is_plain else None


def on_simplex(weights: tuple[float, ...]) -> tuple[float, ...]:
    """The weights divided by their sum, or equal weights if all weights are zero."""
    if _is_on_simplex(weights):
        return weights  # already divided: dividing again would change the last decimal
    total = sum(weights)
    return tuple(weight / total if total > 0 else 1 / len(weights) for weight in weights)


def _is_on_simplex(weights: tuple[float, ...]) -> bool:
    # Each stored weight is off by at most half a unit of the last decimal.
    return abs(sum(weights) - 1) <= len(weights) * 10.0**-COEFFICIENT_DECIMALS
