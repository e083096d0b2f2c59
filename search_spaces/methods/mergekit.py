"""mergekit's counterpart of a merge method: its parameters, and how they become coefficients.

Written from mergekit's configuration format, not from its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from search_spaces.errors import InvalidRecipe

__all__ = [
    "EQUAL_MAGNITUDES",
    "CoefficientValue",
    "Counterpart",
    "Parameter",
    "Scalar",
    "Values",
    "elected",
    "generalized",
    "normalized_weights",
    "summed",
]

Scalar = float | bool
CoefficientValue = float | tuple[float, ...]

EQUAL_MAGNITUDES = (
    "of equal magnitudes at the cut, those kept are drawn by hash; mergekit takes them in no defined order"
)


@dataclass(frozen=True)
class Parameter:
    """A parameter in mergekit's files: one number for all inputs ("shared"), one for "each" input, or one for each
    "expert", an input that is not the base. Without a `default` it must be given; with `is_fixed` only the default is
    accepted."""

    name: str
    scope: Literal["shared", "each", "expert"] = "shared"
    default: Scalar | None = None
    is_fixed: bool = False

    @property
    def is_flag(self) -> bool:
        return isinstance(self.default, bool)


@dataclass(frozen=True)
class Values:
    """The values of the parameters for one tensor, those per source in the order of the sources."""

    by_name: Mapping[str, Scalar | tuple[float, ...]]

    def number(self, name: str) -> float:
        value = self.by_name[name]
        assert not isinstance(value, tuple)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.by_name[name]
        assert isinstance(value, tuple)
        return value


@dataclass(frozen=True)
class Counterpart:
    """mergekit's `method`, with these values of its flags (`settings`), computes what the declared method does.

    `base`: its base model has no effect ("none"), is the recipe's ("recipe"), or the first source ("first").
    `coefficients` converts mergekit's parameters; None: coefficients are the parameters of the same names. Methods
    with the same counterpart have the same `parameters`. `exact_at`: if the two differ, the values of coefficients at
    which they do not.
    """

    method: str
    parameters: tuple[Parameter, ...] = ()
    base: Literal["none", "recipe", "first"] = "none"
    settings: Mapping[str, bool] = field(default_factory=dict)
    coefficients: Callable[[Values], Mapping[str, CoefficientValue]] | None = None
    exact_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def written_settings(self) -> Mapping[str, bool]:
        """The settings that are not mergekit's defaults."""
        defaults = {parameter.name: parameter.default for parameter in self.parameters}
        return {name: value for name, value in self.settings.items() if value != defaults[name]}


def generalized(
    method: str,
    coefficients: Callable[[Values], Mapping[str, CoefficientValue]],
    *others: Parameter,
    normalize: bool,
    rescale: bool,
    exact_at: Mapping[str, float] | None = None,
) -> Counterpart:
    """One of mergekit's variants of task arithmetic. They share their parameters; without a sparse mask `density` and
    `rescale` have no effect."""
    parameters = (
        Parameter("weight", "expert"),
        Parameter("density", "expert", 1.0),
        Parameter("lambda", default=1.0),
        Parameter("normalize", default=normalize),
        Parameter("rescale", default=rescale, is_fixed=method != "task_arithmetic"),
        *others,
    )
    return Counterpart(method, parameters, "recipe", coefficients=coefficients, exact_at=exact_at or {})


def normalized_weights(values: Values) -> Mapping[str, CoefficientValue]:
    """The weights of an average. Raises InvalidRecipe if mergekit does not divide by their sum and it is not 1."""
    weights = values.numbers("weight")
    if not values.by_name["normalize"] and abs(math.fsum(weights) - 1) > 1e-6:
        raise InvalidRecipe(
            f"linear with normalize: false and weights that sum to {math.fsum(weights):g}; here weights sum to 1"
        )
    return {"weight": weights}


def summed(*sparse: str) -> Callable[[Values], Mapping[str, CoefficientValue]]:
    """Coefficients of base + a sum of task vectors: mergekit's weight, divided or not, times its lambda. `sparse` are
    the parameters of the mask, `density` first."""

    def coefficients(values: Values) -> Mapping[str, CoefficientValue]:
        weights = values.numbers("weight")
        total = math.fsum(weights)
        factor = values.number("lambda")
        if values.by_name["normalize"] and abs(total) >= 1e-8:
            factor /= total
        return {"lambda": tuple(factor * weight for weight in weights), **_sparsity(values, sparse)}

    return coefficients


def elected(*sparse: str) -> Callable[[Values], Mapping[str, CoefficientValue]]:
    """Coefficients of base + the task vectors that agree in sign; `sparse` as in `summed`."""

    def coefficients(values: Values) -> Mapping[str, CoefficientValue]:
        shared = {name: values.number(name) for name in ("lambda", "normalize")}
        return {"weight": values.numbers("weight"), **shared, **_sparsity(values, sparse)}

    return coefficients


def _sparsity(values: Values, names: tuple[str, ...]) -> dict[str, CoefficientValue]:
    """At density 1 or more nothing is dropped, whatever the other numbers are."""
    if not names:
        return {}
    densities = values.numbers("density")
    found: dict[str, CoefficientValue] = {"density": tuple(min(density, 1.0) for density in densities)}
    for name in names[1:]:
        pairs = zip(values.numbers(name), densities, strict=True)
        found[name] = tuple(0.0 if density >= 1 else value for value, density in pairs)
    return found
