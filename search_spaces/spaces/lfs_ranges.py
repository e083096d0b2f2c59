"""The merge methods that LFS can search besides the published methods, in the ranges that the methods declare.

Weights are searched as one number per selected expert. For methods that divide by the sum of the weights, these numbers
are divided by their sum before they are stored in a recipe. All random masks have the same seed, so that configurations
differ in their coefficients only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from search_spaces.methods import METHODS
from search_spaces.methods.base import CoefficientValue, MergeMethod, NumSources, PairShare, Range
from search_spaces.parameters import Configuration, Float, Parameter
from search_spaces.recipe import COEFFICIENT_DECIMALS, Merge, Source
from search_spaces.spaces.lfs_methods import PUBLISHED, ComponentGroup, SearchedMethod, on_simplex

__all__ = ["SEARCHED_METHODS", "SEED", "PairInterpolation", "RangedMethod"]

SEED = 0


@dataclass(frozen=True)
class RangedMethod:
    """A merge method that declares ranges of its coefficients; the LFS space searches the coefficients in these ranges.

    Coefficients without a declared range keep their defaults.
    """

    method: MergeMethod

    @property
    def name(self) -> str:
        return self.method.name

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return tuple(
            Float(key, range_.low, range_.high, conditions=conditions)
            for name, range_ in self._ranges.items()
            for key, conditions in (
                [(self._key(cell, name, expert), cell.conditions + cell.is_selected[expert]) for expert in cell.experts]
                if range_.per_expert
                else [(self._key(cell, name), cell.conditions)]
            )
        )

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        sources = tuple(Source(model) for model in operands)
        if len(operands) < self.method.min_sources:
            return Merge("passthrough", sources)
        coefficients: dict[str, CoefficientValue] = dict(self._counts(len(operands)))
        for name, range_ in self._ranges.items():
            if not range_.per_expert:
                coefficients[name] = configuration[self._key(cell, name)]
                continue
            numbers = tuple(configuration.get(self._key(cell, name, model), range_.default) for model in operands)
            coefficients[name] = on_simplex(numbers) if range_.on_simplex else numbers
        return Merge(self.name, sources, coefficients, SEED if self.method.takes_seed else None)

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        models = tuple(source.model for source in merge.sources)
        if merge.method == "passthrough" and self.name != "passthrough":
            return self._encode_model(cell, operands, models[0])
        if merge.method != self.name or not self._fits(operands, models):
            return None
        if any(merge.number(name) != value for name, value in self._counts(len(operands)).items()):
            return None
        values: dict[str, Any] = {}
        for name, range_ in self._ranges.items():
            if range_.per_expert:
                own = dict(zip(models, merge.per_source(name), strict=True))
                values |= {self._key(cell, name, model): own.get(model, 0.0) for model in operands}
            elif isinstance(merge.coefficients.get(name), tuple):
                return None
            else:
                values[self._key(cell, name)] = merge.number(name)
        return values

    def _encode_model(self, cell: ComponentGroup, operands: tuple[str, ...], model: str) -> dict[str, Any] | None:
        """Parameter values with which the merge is the model `model` unchanged; None if no values do that.

        `cell` is the part of the model that is merged, a component group (such as attention) of a layer group;
        `operands` are the aliases of the models that are merged in it. There are such values in three cases:

        - `model` is the base, and a searched coefficient whose range includes 0 makes the merge the base if it is 0.
        - `model` is the first operand, and a coefficient makes the merge the first operand if it is 0 (the field
          `first_at_zero` of the method).
        - `model` is the only operand, and the method returns a single source unchanged, or needs several sources. A
          single operand of a method that needs several is copied (method `decode`).
        """
        method = self.method
        leaves_base = (method.base_at_zero, None if method.is_itself_alone else method.drops_zeros)
        zero = next(
            (
                name
                for name, range_ in self._ranges.items()
                if name in leaves_base and range_.low <= 0 and not range_.on_simplex
            ),
            None,
        )
        is_alone = operands == (model,) and (method.is_itself_alone or len(operands) < method.min_sources)
        is_first = method.first_at_zero is not None and operands[0] == model
        if not (is_alone or is_first or (zero is not None and model == cell.base)):
            return None
        zeros = {zero, method.first_at_zero if is_first else None}
        return {
            self._key(cell, name, owner): 0.0 if name in zeros else range_.high
            for name, range_ in self._ranges.items()
            for owner in (operands if range_.per_expert else (None,))
        }

    def _fits(self, operands: tuple[str, ...], models: tuple[str, ...]) -> bool:
        if self.method.is_ordered:
            return models == operands
        drops = self.method.drops_zeros
        may_lack = any(name == drops and range_.per_expert for name, range_ in self._ranges.items())
        return set(models) == set(operands) or (may_lack and set(models) < set(operands))

    @property
    def _ranges(self) -> dict[str, Range]:
        return {c.name: c.searched for c in self.method.coefficients if isinstance(c.searched, Range)}

    def _counts(self, num_operands: int) -> dict[str, float]:
        """Values of the coefficients that are numbers of sources, such as how many must agree, keyed by coefficient.

        A search does not vary these coefficients. Each has the value that the method declares, but at most
        `num_operands`, the number of merged models.
        """
        return {
            c.name: min(c.searched.value, num_operands)
            for c in self.method.coefficients
            if isinstance(c.searched, NumSources)
        }

    def _key(self, cell: ComponentGroup, coefficient: str, model: str | None = None) -> str:
        key = f"{cell.name}.{self.name}.{coefficient}"
        return key if model is None else f"{key}.{model}"


@dataclass(frozen=True)
class PairInterpolation:
    """A merge method of two models in LFS, whose weights 1 - t and t follow from the search parameter t.

    `share` is the search range of t, which the method declares.
    """

    method: MergeMethod
    share: PairShare

    @property
    def name(self) -> str:
        return self.method.name

    def parameters(self, cell: ComponentGroup) -> tuple[Parameter, ...]:
        return (Float(self._key(cell), self.share.low, self.share.high, conditions=cell.conditions),)

    def decode(self, cell: ComponentGroup, operands: tuple[str, ...], configuration: Configuration) -> Merge:
        t = round(configuration[self._key(cell)], COEFFICIENT_DECIMALS)
        return Merge(self.name, tuple(Source(model) for model in operands), {"weight": (1 - t, t)})

    def encode(self, cell: ComponentGroup, operands: tuple[str, ...], merge: Merge) -> dict[str, Any] | None:
        models = tuple(source.model for source in merge.sources)
        if merge.method == "passthrough":
            return {self._key(cell): float(operands.index(models[0]))} if models[0] in operands else None
        if merge.method != self.name or set(models) != set(operands):
            return None
        return {self._key(cell): dict(zip(models, merge.per_source("weight"), strict=True))[operands[1]]}

    def _key(self, cell: ComponentGroup) -> str:
        return f"{cell.name}.{self.name}.t"


def _searched(method: MergeMethod) -> SearchedMethod:
    share = next((c.searched for c in method.coefficients if isinstance(c.searched, PairShare)), None)
    return RangedMethod(method) if share is None else PairInterpolation(method, share)


# In the order in which methods are searched, and tried when a recipe is encoded.
SEARCHED_METHODS: dict[str, SearchedMethod] = {
    **PUBLISHED,
    **{name: _searched(method) for name, method in METHODS.items() if name not in PUBLISHED},
}
