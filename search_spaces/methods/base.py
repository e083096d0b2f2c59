"""The types that declare a merge method, its coefficients, and the ranges in which the coefficients are searched."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, Self

from search_spaces.methods.mergekit import CoefficientValue, Counterpart

__all__ = [
    "COEFFICIENT_DECIMALS",
    "Coefficient",
    "CoefficientValue",
    "MergeMethod",
    "NumSources",
    "Numbers",
    "PairShare",
    "Range",
    "SourceChoice",
]

# Coefficients are rounded to this many decimals before hashing and before merging: two configurations that differ by
# less are the same merge.
COEFFICIENT_DECIMALS = 6

# A function from a coefficient's name to its numbers, one per source.
Numbers = Callable[[str], tuple[float, ...]]

# The kind of sources among which a search chooses for a method: subsets of the experts, pairs of models, pairs in
# either order, or single models.
SourceChoice = Literal["experts", "pair", "ordered pair", "model"]


@dataclass(frozen=True)
class Range:
    """The range [low, high] in which a coefficient is searched.

    With `per_expert` each expert that is merged has its own parameter; otherwise all experts share one parameter. With
    `on_simplex` the experts' coefficients are divided by their sum before they are stored in a recipe. If a
    configuration selects no expert, it has no parameters for experts, and all experts are merged with the coefficient
    `default`.
    """

    low: float
    high: float
    per_expert: bool = False
    on_simplex: bool = False
    default: float = 1.0


@dataclass(frozen=True)
class PairShare:
    """The search range [low, high] of t, the weight of the second of two models.

    The weight of the first model is 1 - t.
    """

    low: float = 0.0
    high: float = 1.0


@dataclass(frozen=True)
class NumSources:
    """Rule for a coefficient that is a number of sources, such as how many must agree; it is not searched.

    The coefficient is `value`, or the merge's number of sources if this number is smaller.
    """

    value: float


@dataclass(frozen=True)
class Coefficient:
    """The declaration of a coefficient of a merge method: its range [low, high], its default, and how it is searched.

    - `per_model`: whether a merge may state one number for each source instead of one number for all sources
    - `default`: the value of a coefficient that a merge does not state; a coefficient without a default must be stated.
      Canonical recipes leave out a coefficient that has its default.
    - `is_whole`: whether only whole numbers are accepted
    - `searched`: how a search varies the coefficient; None if it keeps its default
    - `has_gradient`: whether the merged tensor is differentiable with respect to the coefficient; the elements that the
      method keeps and the signs that it elects are held fixed
    - `decimals`: the number of decimals to which the coefficient is rounded; small coefficients, such as tolerances,
      need many decimals
    """

    name: str
    low: float = -math.inf
    high: float = math.inf
    per_model: bool = False
    default: float | None = None
    is_whole: bool = False
    searched: Range | PairShare | NumSources | None = None
    has_gradient: bool = False
    decimals: int = COEFFICIENT_DECIMALS

    def searched_in(self, low: float, high: float) -> Self:
        """A copy of the coefficient that is searched in [low, high], with one number for all experts."""
        return replace(self, searched=Range(low, high))

    @property
    def accepts(self) -> str:
        """The values that the coefficient accepts, in words for error messages, such as "a number in [0, 1]"."""
        kind = "a whole number" if self.is_whole else "a number"
        if self.low == -math.inf:
            return f"{kind}"
        return f"{kind} from {self.low:g}" if self.high == math.inf else f"{kind} in [{self.low:g}, {self.high:g}]"

    def contains(self, value: float) -> bool:
        """Whether the coefficient accepts `value`: it is in the range and, if required, a whole number."""
        return self.low <= value <= self.high and (not self.is_whole or value == int(value))


@dataclass(frozen=True, kw_only=True)
class MergeMethod:
    """The declaration of a merge method: sources, coefficients, search ranges, origin and mergekit's counterpart.

    - `source`: the paper, program or page that the method is from
    - `variant`: the difference of the method from methods of a similar name and from other implementations
    - `is_ordered`: whether the sources have different roles, so that their order is kept
    - `takes_seed`: whether the method draws random masks
    - `cuts_at_rank`: whether the method treats an element by the rank of its magnitude or variance, so that elements
      with equal values need a defined order
    - `trims`: whether the method keeps a share of each task vector's elements, by their magnitude; the recipe decides
      whether it is a share of each tensor or of all tensors of the model together
    - `drops_zeros`: the name of a coefficient; a source for which it is 0 has no influence on the merge
    - `base_at_zero`: the name of a coefficient; if it is 0, the merge is the base model
    - `first_at_zero`: the name of a coefficient; if it is 0, the merge is the first source
    - `is_itself_alone`: whether a merge of a single source is that source
    - `depends_on_device`: whether the method uses exponentials or matrix products, whose last bits differ between a CPU
      and a GPU
    - `constraint`: a function that checks coefficients together, after each was found in its range; it returns a
      message about the problem, or None
    - `mergekit`: the method of mergekit that computes the same tensors; None if mergekit has none
    - `mergekit_difference`: the reason why recipes of the method are not exported to mergekit, as the end of a sentence
      that begins with the method's name; recipes whose coefficients are those of `Counterpart.exact_at` are exported
      nevertheless
    """

    name: str
    source: str
    variant: str
    coefficients: tuple[Coefficient, ...] = ()
    needs_base: bool = False
    min_sources: int = 1
    max_sources: int | None = None
    is_ordered: bool = False
    takes_seed: bool = False
    cuts_at_rank: bool = False
    trims: bool = False
    drops_zeros: str | None = None
    base_at_zero: str | None = None
    first_at_zero: str | None = None
    is_itself_alone: bool = False
    depends_on_device: bool = False
    constraint: Callable[[Numbers], str | None] | None = None
    mergekit: Counterpart | None = None
    mergekit_difference: str | None = None

    @property
    def source_choice(self) -> SourceChoice:
        """The kind of sources that a search chooses for this method: experts, a pair, an ordered pair, or one model."""
        if self.max_sources is None:
            return "experts"
        if self.max_sources == 1:
            return "model"
        return "ordered pair" if self.is_ordered else "pair"

    def coefficient(self, name: str) -> Coefficient | None:
        """The declared coefficient with this name, or None if the method has no such coefficient."""
        for coefficient in self.coefficients:
            if coefficient.name == name:
                return coefficient
        return None

    @property
    def gradients_by(self) -> tuple[Coefficient, ...]:
        """Coefficients with respect to which the merged tensor of this method is differentiable; may be empty."""
        return tuple(coefficient for coefficient in self.coefficients if coefficient.has_gradient)

    def range_of(self, name: str) -> Range:
        """The search range of the coefficient `name`.

        The method must declare the coefficient as searched in a range.
        """
        coefficient = self.coefficient(name)
        assert coefficient is not None, f"{self.name} takes no coefficient {name!r}"
        assert isinstance(coefficient.searched, Range), f"{self.name}.{name} is not searched in a range"
        return coefficient.searched

    def problems(
        self, num_sources: int, coefficients: Mapping[str, CoefficientValue], seed: int | None
    ) -> Iterator[str]:
        """Error messages about the number of sources, the coefficients and the seed of a merge by this method.

        A merge by this method has `num_sources` sources, the values `coefficients`, keyed by name, and the `seed` of
        its random masks, or None. Missing coefficients are not reported.
        """
        if not self.min_sources <= num_sources <= (self.max_sources or num_sources):
            accepted = self.min_sources if self.max_sources else f"at least {self.min_sources}"
            yield f"{self.name} has {num_sources} sources; it takes {accepted}"
        for name, value in coefficients.items():
            coefficient = self.coefficient(name)
            if coefficient is None:
                known = ", ".join(coefficient.name for coefficient in self.coefficients) or "none"
                yield f"{self.name} takes no coefficient {name!r}; it takes {known}"
                continue
            for number in value if isinstance(value, tuple) else (value,):
                if not coefficient.contains(number):
                    yield f"{self.name}.{name} is {number:g}; give {coefficient.accepts}"
        if self.takes_seed and (seed is None or seed < 0):
            yield f"{self.name} draws random masks and its seed is {seed}; give a whole number from 0"
        if not self.takes_seed and seed is not None:
            yield f"{self.name} draws no masks, but its seed is {seed}; leave it out"
