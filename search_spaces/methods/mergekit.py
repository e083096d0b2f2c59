"""mergekit's counterpart of a merge method: the counterpart's parameters, and their conversion to coefficients.

The module was written from mergekit's configuration format, not from its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

__all__ = [
    "EQUAL_MAGNITUDES",
    "CoefficientValue",
    "Counterpart",
    "Parameter",
    "Scalar",
    "Values",
    "elected",
    "generalized",
    "summed",
]

Scalar = float | bool
CoefficientValue = float | tuple[float, ...]

EQUAL_MAGNITUDES = (
    "of equal magnitudes at the cut, those kept are drawn by hash; mergekit takes them in no defined order"
)


@dataclass(frozen=True)
class Parameter:
    """A parameter in mergekit's configuration files.

    `scope` says how many values the parameter has. "shared" means one number for all inputs, "each" means one number
    for each input, and "expert" means one number for each input that is not the base. A parameter without a `default`
    must be given.
    """

    name: str
    scope: Literal["shared", "each", "expert"] = "shared"
    default: Scalar | None = None

    @property
    def is_flag(self) -> bool:
        """Whether the parameter is a boolean instead of a number."""
        return isinstance(self.default, bool)


@dataclass(frozen=True)
class Values:
    """The values of a merge method's parameters in a mergekit configuration, for one tensor.

    `by_name` has the value of each parameter: a number, true or false, or a tuple with one number per source, in the
    order of the sources.
    """

    by_name: Mapping[str, Scalar | tuple[float, ...]]

    def number(self, name: str) -> float:
        """The value of the parameter `name`, which must be one number for all inputs."""
        value = self.by_name[name]
        assert not isinstance(value, tuple)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        """The values of the parameter `name`, which must have one number per source."""
        value = self.by_name[name]
        assert isinstance(value, tuple)
        return value


@dataclass(frozen=True)
class Counterpart:
    """The method of mergekit that computes the same tensors as one of this project's merge methods.

    - `method`: the name of mergekit's method
    - `settings`: the values of mergekit's flags, keyed by name
    - `base`: the role of mergekit's base model: it has no effect ("none"), it is the recipe's base ("recipe"), or it is
      the first source ("first")
    - `parameters`: the parameters of mergekit's method; merge methods with the same counterpart list the same
      parameters
    - `coefficients`: the function that converts mergekit's parameters to coefficients; None if each coefficient is the
      parameter of the same name
    - `exact_at`: the values of the merge method's coefficients, keyed by name, at which mergekit computes the same
      tensors; empty if this does not depend on coefficients
    """

    method: str
    parameters: tuple[Parameter, ...] = ()
    base: Literal["none", "recipe", "first"] = "none"
    settings: Mapping[str, bool] = field(default_factory=dict)
    coefficients: Callable[[Values], Mapping[str, CoefficientValue]] | None = None
    exact_at: Mapping[str, float] = field(default_factory=dict)

    @property
    def written_settings(self) -> Mapping[str, bool]:
        """Settings that a mergekit configuration must state, because they differ from mergekit's defaults."""
        defaults = {parameter.name: parameter.default for parameter in self.parameters}
        return {name: value for name, value in self.settings.items() if value != defaults[name]}


def generalized(
    method: str,
    coefficients: Callable[[Values], Mapping[str, CoefficientValue]],
    *others: Parameter,
    normalize: bool,
    rescale: bool,
    exact_at: Mapping[str, float] | None = None,
    settings: Mapping[str, bool] | None = None,
) -> Counterpart:
    """Declare the mergekit counterpart of a merge method that mergekit implements as a variant of task arithmetic.

    All variants have the parameters weight, density, lambda, normalize and rescale. For variants without a sparse mask,
    the parameters `density` and `rescale` have no effect.

    - `method`: mergekit's name of the variant
    - `coefficients`: converts the values of mergekit's parameters to the merge method's coefficients
    - `others`: further parameters of this variant
    - `normalize` and `rescale`: the defaults of these two parameters
    - `exact_at`: the values of the merge method's coefficients at which mergekit computes the same tensors; None if
      this does not depend on coefficients
    - `settings`: the values of mergekit's boolean parameters with which mergekit computes the merge method, keyed by
      name
    """
    parameters = (
        Parameter("weight", "expert"),
        Parameter("density", "expert", 1.0),
        Parameter("lambda", default=1.0),
        Parameter("normalize", default=normalize),
        Parameter("rescale", default=rescale),
        *others,
    )
    return Counterpart(method, parameters, "recipe", settings or {}, coefficients, exact_at or {})


def summed(*sparse: str) -> Callable[[Values], Mapping[str, CoefficientValue]]:
    """Make a function that converts mergekit's parameters to coefficients, for methods that add task vectors.

    The coefficient lambda of each source is mergekit's weight of the source times mergekit's lambda. If mergekit
    normalizes, the weight is divided by the sum of all weights. `sparse` are the names of mergekit's parameters that
    describe the mask of the sparse task vectors: "density" first, then others, such as "gamma". Without names there is
    no mask. A source with density 0 gets the lambda 0, but its weight counts in the sum of all weights.
    """

    def coefficients(values: Values) -> Mapping[str, CoefficientValue]:
        weights = values.numbers("weight")
        total = math.fsum(weights)
        factor = values.number("lambda")
        if values.by_name["normalize"] and abs(total) >= 1e-8:
            factor /= total
        kept = _kept(values, sparse)
        lambdas = tuple(factor * weight if is_kept else 0.0 for weight, is_kept in zip(weights, kept, strict=True))
        return {"lambda": lambdas, **_sparsity(values, sparse)}

    return coefficients


def elected(*sparse: str) -> Callable[[Values], Mapping[str, CoefficientValue]]:
    """Make a function that converts mergekit's parameters to coefficients, for methods that elect signs (TIES).

    `sparse` are the names of mergekit's parameters that describe the mask of the sparse task vectors: "density" first,
    then others, such as "gamma". Without names there is no mask.
    """

    def coefficients(values: Values) -> Mapping[str, CoefficientValue]:
        shared = {name: values.number(name) for name in ("lambda", "normalize")}
        pairs = zip(values.numbers("weight"), _kept(values, sparse), strict=True)
        weights = tuple(weight if is_kept else 0.0 for weight, is_kept in pairs)
        return {"weight": weights, **shared, **_sparsity(values, sparse)}

    return coefficients


def _kept(values: Values, names: tuple[str, ...]) -> tuple[bool, ...]:
    """For each task vector of a merge, whether its sparse mask keeps at least one element: its density is not 0.

    `values` are the values of mergekit's parameters. `names` are the names of the parameters that describe the mask;
    without names there is no mask, and all elements are kept.
    """
    return tuple(not names or density != 0 for density in values.numbers("density"))


def _sparsity(values: Values, names: tuple[str, ...]) -> dict[str, CoefficientValue]:
    """Convert the parameters that describe a sparse mask in mergekit to coefficients of the merge method.

    `values` are the values of mergekit's parameters, and `names` those that describe the mask, "density" first. Without
    names the result is empty. A density above 1 becomes 1. A density of 0 also becomes 1: the callers drop such a task
    vector by giving it the weight 0 (function `_kept`).
    """
    if not names:
        return {}
    densities = tuple(density or 1.0 for density in values.numbers("density"))
    found: dict[str, CoefficientValue] = {"density": tuple(min(density, 1.0) for density in densities)}
    for name in names[1:]:
        if name == "rescale":
            found[name] = values.number(name)
            continue
        pairs = zip(values.numbers(name), densities, strict=True)
        found[name] = tuple(0.0 if density >= 1 else value for value, density in pairs)
    return found
