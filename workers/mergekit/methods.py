"""For each of mergekit's merge methods, the methods of this project that compute the same tensors.

Several methods of this project can correspond to one method of mergekit. The flags of mergekit's method, and whether
there is a base model, decide which of these methods is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.base import Coefficient, CoefficientValue, MergeMethod
from search_spaces.methods.mergekit import Counterpart, Parameter, Values
from search_spaces.recipe import Merge, Source

__all__ = ["MERGEKIT_METHODS", "WITHOUT_EFFECT", "Inputs", "MergekitMethod"]


@dataclass(frozen=True)
class Inputs:
    """Inputs of one tensor's merge in mergekit's terms: sources, base model, and parameter values.

    `sources` does not contain the base, except for methods that treat the base like any other model. `base` is None if
    there is no base model. A parameter with a value for each source has its values in the order of `sources`. `seed` is
    for methods with random masks.
    """

    sources: tuple[Source, ...]
    base: Source | None
    values: Values
    seed: int


@dataclass(frozen=True)
class MergekitMethod:
    """One of mergekit's merge methods, with the methods of this project that compute the same tensors.

    Each of `variants` is a pair of a method of this project and the settings of mergekit's method with which it
    computes the same tensors. `parameters` are the parameters of mergekit's method. `base` says whether mergekit's
    method needs a base model.
    """

    variants: tuple[tuple[MergeMethod, Counterpart], ...]

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        return self.variants[0][1].parameters

    @property
    def base(self) -> Literal["needed", "optional", "unused"]:
        bases = {counterpart.base for _, counterpart in self.variants}
        if "none" not in bases:
            return "needed"
        return "unused" if bases == {"none"} else "optional"

    def to_merge(self, inputs: Inputs) -> Merge:
        """Convert mergekit's merge of one tensor to the equivalent merge of this project.

        `inputs` has the tensor's sources and base model and the values of mergekit's parameters. If there are no
        sources, a method that adds task vectors to a base gives the base itself. Raises InvalidRecipe if no method of
        this project gives the same tensor.
        """
        method, counterpart = self._variant(inputs)
        sources = inputs.sources
        if counterpart.base == "first":
            assert inputs.base is not None
            sources = (inputs.base, *sources)
        if not sources and self.base == "needed" and method.min_sources == 1:
            assert inputs.base is not None
            return Merge("passthrough", (inputs.base,))
        coefficients = _coefficients(method, counterpart, inputs.values)
        return Merge(method.name, sources, coefficients, inputs.seed if method.takes_seed else None)

    def _variant(self, inputs: Inputs) -> tuple[MergeMethod, Counterpart]:
        has_base = self.base == "needed" or (self.base == "optional" and inputs.base is not None)
        possible = [variant for variant in self.variants if (variant[1].base != "none") == has_base]
        values = inputs.values.by_name
        fitting = (
            variant for variant in possible if all(values[n] == value for n, value in variant[1].settings.items())
        )
        if (found := next(fitting, None)) is not None:
            return found
        flags = {name for _, counterpart in possible for name in counterpart.settings}
        name = next(name for name in flags if all(c.settings.get(name) != values[name] for _, c in possible))
        raise InvalidRecipe(
            f"{name}: {str(values[name]).lower()} is not supported with{'' if has_base else 'out'} a base_model; "
            "leave one of them out"
        )


def _coefficients(method: MergeMethod, counterpart: Counterpart, values: Values) -> Mapping[str, CoefficientValue]:
    if counterpart.coefficients is not None:
        return counterpart.coefficients(values)
    scopes = {parameter.name: parameter.scope for parameter in counterpart.parameters}
    return {
        coefficient.name: _value(coefficient, values, is_shared=scopes[coefficient.name] == "shared")
        for coefficient in method.coefficients
        if coefficient.name in scopes
    }


def _value(coefficient: Coefficient, values: Values, *, is_shared: bool) -> CoefficientValue:
    if is_shared:
        return values.number(coefficient.name)
    numbers = values.numbers(coefficient.name)
    return numbers if coefficient.per_model else numbers[0]


def _methods() -> dict[str, MergekitMethod]:
    variants: dict[str, list[tuple[MergeMethod, Counterpart]]] = {}
    for method in METHODS.values():
        if method.mergekit is not None:
            variants.setdefault(method.mergekit.method, []).append((method, method.mergekit))
    return {name: MergekitMethod(tuple(found)) for name, found in variants.items()}


MERGEKIT_METHODS: Mapping[str, MergekitMethod] = _methods()

# Parameters that some methods accept, without effect on any result.
WITHOUT_EFFECT = ("int8_mask",)
