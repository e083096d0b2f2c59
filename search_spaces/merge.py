"""Merges of the tensors of several models, each with a method and coefficients, and the canonical form of a merge.

Merges that give the same tensors have the same canonical form if the declarations in `methods` show that they are
equal. This module does not depend on recipes. Other packages import `Merge` and `Source` from `recipe`.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.base import COEFFICIENT_DECIMALS, Coefficient, CoefficientValue, MergeMethod

__all__ = ["Merge", "Source", "canonical_merge"]


@dataclass(frozen=True, order=True)
class Source:
    """One operand of a merge: a model's alias and, for tensors of decoder layers, the layer's number (0-based)."""

    model: str
    layer: int | None = None


@dataclass(frozen=True)
class Merge:
    """The merge of one part of a model, such as a layer's attention: its method, source models and coefficients.

    `coefficients` maps a name to one number that all sources share, or to a tuple with one number per source, in the
    order of `sources`. Methods on task vectors, such as task_arithmetic and ties, subtract `base`, which is not one of
    the `sources`; its default is the recipe's base model, in the layer of the sources. SLERP interpolates from the
    first source (t = 0) to the second (t = 1). `seed` is the seed of random masks. The package `search_spaces.methods`
    declares which coefficients each method takes.
    """

    method: str
    sources: tuple[Source, ...]
    coefficients: Mapping[str, CoefficientValue] = field(default_factory=dict)
    seed: int | None = None
    base: Source | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise InvalidRecipe(f"merge: method {self.method!r} has no sources; give at least one")
        rounded: dict[str, CoefficientValue] = {}
        for name in sorted(self.coefficients):
            value, decimals = self.coefficients[name], self._decimals(name)
            if isinstance(value, tuple):
                if len(value) != len(self.sources):
                    raise InvalidRecipe(
                        f"merge: {self.method}.{name} has {len(value)} numbers for {len(self.sources)} sources; "
                        "give one per source"
                    )
                rounded[name] = tuple(_rounded(v, decimals) for v in value)
            else:
                rounded[name] = _rounded(value, decimals)
        object.__setattr__(self, "coefficients", rounded)

    def __hash__(self) -> int:
        # The sources after the first rarely differ where the rest is equal, and hashing them takes time.
        return hash((self.method, self.sources[0].model, self.sources[0].layer, *self.coefficients.items(), self.seed))

    def number(self, name: str) -> float:
        """The value of the coefficient `name`, which all sources share, or its default if the merge does not state it.

        Raises InvalidRecipe if the coefficient is missing and has no default, or if it has one number per source.
        """
        value = self.coefficients[name] if name in self.coefficients else self._default(name)
        if value is None or isinstance(value, tuple):
            raise InvalidRecipe(f"merge: {self.method} needs one number {name!r}, found {value!r}")
        return value

    def per_source(self, name: str) -> tuple[float, ...]:
        """The values of the coefficient `name`, one for each source; a number that all sources share is repeated.

        A coefficient that the merge does not state has its default. Raises InvalidRecipe if the coefficient is not
        stated and has no default.
        """
        value = self.coefficients[name] if name in self.coefficients else self._default(name)
        if value is None:
            raise InvalidRecipe(f"merge: {self.method} needs {name!r}, found only {sorted(self.coefficients)}")
        return value if isinstance(value, tuple) else (value,) * len(self.sources)

    def check(self) -> None:
        """Check the merge's sources, coefficients and seed; raise InvalidRecipe if its method does not accept them."""
        declared = METHODS.get(self.method)
        if declared is None:
            raise InvalidRecipe(f"merge: unknown merge method {self.method!r}; known are {', '.join(METHODS)}")
        for problem in declared.problems(len(self.sources), self.coefficients, self.seed):
            raise InvalidRecipe(f"merge: {problem}")
        for coefficient in declared.coefficients:
            if coefficient.per_model:
                self.per_source(coefficient.name)
            else:
                self.number(coefficient.name)
        broken = None if declared.constraint is None else declared.constraint(self.per_source)
        if broken is not None:
            raise InvalidRecipe(f"merge: {self.method}: {broken}")

    def base_in(self, recipe_base: str) -> Source:
        """Model and layer whose tensors are subtracted from the sources' tensors to get task vectors.

        The result is the field `base` or, if this is None, the recipe's base model `recipe_base` in the layer of the
        sources.
        """
        return self.base or Source(recipe_base, self.sources[0].layer)

    def at_layer(self, layer: int | None) -> Self:
        """A copy of the merge in which all sources are in layer `layer`.

        With `layer` None, the sources' tensors are outside layers.
        """
        return replace(self, sources=tuple(Source(source.model, layer) for source in self.sources))

    def _default(self, name: str) -> float | None:
        coefficient = self._declared(name)
        return None if coefficient is None else coefficient.default

    def _decimals(self, name: str) -> int:
        coefficient = self._declared(name)
        return COEFFICIENT_DECIMALS if coefficient is None else coefficient.decimals

    def _declared(self, name: str) -> Coefficient | None:
        declared = METHODS.get(self.method)
        return None if declared is None else declared.coefficient(name)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "method": self.method,
            "sources": [[source.model, source.layer] for source in self.sources],
        }
        if self.coefficients:
            document["coefficients"] = {
                name: list(value) if isinstance(value, tuple) else value for name, value in self.coefficients.items()
            }
        if self.seed is not None:
            document["seed"] = self.seed
        if self.base is not None:
            document["base"] = [self.base.model, self.base.layer]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        try:
            return cls(
                method=str(document["method"]),
                sources=tuple(map(_source, document["sources"])),
                coefficients={
                    name: tuple(float(v) for v in value) if isinstance(value, list) else float(value)
                    for name, value in document.get("coefficients", {}).items()
                },
                seed=_whole(document.get("seed")),
                base=_source(document["base"]) if "base" in document else None,
            )
        except InvalidRecipe:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRecipe(f"merge: not a merge: {document!r} ({error!r})") from error


def _whole(value: Any) -> int | None:
    """Return `value` if it is a whole number or None; raise TypeError otherwise."""
    return None if value is None else operator.index(value)


def _source(document: Any) -> Source:
    model, layer = document
    return Source(str(model), _whole(layer))


def _rounded(value: float, decimals: int) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidRecipe(f"merge: coefficient {value} is not a finite number")
    return round(float(value), decimals) + 0.0  # + 0.0 turns -0.0 into 0.0


def _passthrough(source: Source) -> Merge:
    return Merge("passthrough", (source,))


def canonical_merge(merge: Merge, *, base: str, fingerprints: Mapping[str, str]) -> Merge:
    """The simplest merge that gives the same tensors as `merge`.

    Sources without influence are left out. A merge that equals one of its sources becomes a merge by the method
    passthrough, which copies its only source. Sources are ordered by (fingerprint, layer), unless their order has a
    meaning. Coefficients equal to their defaults are left out, and equal coefficients of all sources become one number.
    Equality is found only from the declaration of each merge method, so two merges may give equal tensors and still
    have different canonical forms. `base` is the alias of the recipe's base model. `fingerprints` has the content
    fingerprint of each model, keyed by alias.
    """
    base_source, declared = merge.base_in(base), METHODS[merge.method]
    coefficients, sources = dict(merge.coefficients), merge.sources

    if merge.method == "slerp":
        t, (first, second) = merge.number("t"), sources
        if t == 0 or first == second:
            return _passthrough(first)
        if t == 1:
            return _passthrough(second)
        if _order(second, fingerprints) < _order(first, fingerprints):
            return Merge("slerp", (second, first), {"t": 1 - t})
        return merge

    if declared.base_at_zero is not None and not any(merge.per_source(declared.base_at_zero)):
        return _passthrough(base_source)
    if declared.first_at_zero is not None and (merge.number(declared.first_at_zero) == 0 or sources[0] == sources[1]):
        return _passthrough(sources[0])
    if (name := declared.drops_zeros) is not None:
        weights = merge.per_source(name)
        # With task arithmetic, the base's own task vector is zero.
        is_sum = merge.method == "task_arithmetic"
        kept = [i for i, weight in enumerate(weights) if weight != 0 and not (is_sum and sources[i] == base_source)]
        if not kept and declared.needs_base and not declared.is_itself_alone:
            return _passthrough(base_source)
        is_sum |= merge.method == "linear"
        if len(kept) == 1 and (declared.is_itself_alone or (is_sum and weights[kept[0]] == 1)):
            return _passthrough(sources[kept[0]])
        if kept:
            sources = tuple(sources[i] for i in kept)
            coefficients = _of_sources(coefficients, kept)
    if declared.is_itself_alone and len(sources) == 1:
        return _passthrough(sources[0])
    coefficients = _brief(coefficients, declared)
    if not declared.is_ordered:
        order = sorted(range(len(sources)), key=lambda i: _order(sources[i], fingerprints))
        sources = tuple(sources[i] for i in order)
        coefficients = _of_sources(coefficients, order)
    is_usual = not declared.needs_base or all(Source(base, source.layer) == base_source for source in sources)
    found = Merge(merge.method, sources, coefficients, merge.seed, None if is_usual else merge.base)
    return merge if found == merge else found


def _of_sources(coefficients: Mapping[str, CoefficientValue], at: Sequence[int]) -> dict[str, CoefficientValue]:
    return {name: tuple(v[i] for i in at) if isinstance(v, tuple) else v for name, v in coefficients.items()}


def _brief(coefficients: Mapping[str, CoefficientValue], declared: MergeMethod) -> dict[str, CoefficientValue]:
    """Shortest form of a merge's coefficients, if the merge is by the method `declared`.

    A coefficient equal to its default is left out. If all sources have the same number, the number is stated only once.
    """
    brief: dict[str, CoefficientValue] = {}
    for name, value in coefficients.items():
        shared = value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
        known = declared.coefficient(name)
        if known is None or known.default is None or shared != known.default:
            brief[name] = shared
    return brief


def _order(source: Source, fingerprints: Mapping[str, str]) -> tuple[str, int]:
    return fingerprints[source.model], -1 if source.layer is None else source.layer
