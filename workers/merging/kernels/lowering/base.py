"""The decorator by which the rule of a fused method is found, and what rules are computed from."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge
from workers.merging.kernels.rules import ByMagnitude, ByMark, Comparison, Numbers, Rule, Trimmed, Words
from workers.merging.methods.arithmetic import Products, num_kept
from workers.merging.methods.plain import Operands
from workers.merging.order_statistics import Ranked, Trim

__all__ = [
    "RULES",
    "Fused",
    "Lowering",
    "bounds",
    "comparisons",
    "cosine",
    "factors",
    "fuses",
    "magnitudes",
    "products",
    "reductions",
    "trimmed",
]

Lowering = Callable[[Merge, Operands], Rule]


@dataclass(frozen=True)
class Fused:
    """How a method becomes a rule; `is_on_cuda`: there is a kernel of that rule for CUDA."""

    lowering: Lowering
    is_on_cuda: bool


# Complete once all modules of this package are imported.
RULES: dict[str, Fused] = {}


def fuses(name: str, *, is_on_cuda: bool = False) -> Callable[[Lowering], Lowering]:
    """The decorated function gives the rule of the declared method `name`. Raises ValueError for an undeclared method,
    or one that has a rule."""
    if name not in METHODS:
        raise ValueError(f"merge method {name!r} is not declared; declare it in a module of search_spaces/methods")
    if name in RULES:
        raise ValueError(f"{name} has a rule in {RULES[name].lowering.__module__} already; a method has at most one")

    def register(lowering: Lowering) -> Lowering:
        RULES[name] = Fused(lowering, is_on_cuda)
        return lowering

    return register


def trimmed(stored: Operands, shares: Sequence[float]) -> Trimmed:
    """The elements of largest magnitude of each task vector, of the sources' `shares`."""
    ranks = [num_kept(share, stored.tensors[0].numel()) for share in shares]
    trims = [table.trim(rank) for table, rank in zip(magnitudes(stored), ranks, strict=True)]
    (by,) = comparisons(trims)
    return Trimmed(by, *bounds(trims), factors(stored))


def comparisons(*each: Iterable[Trim]) -> list[Comparison]:
    """By what elements are compared with places, of the same kind for all."""
    rows = [list(trims) for trims in each]
    if any(trim.is_tied for row in rows for trim in row):
        return [ByMark() for _ in rows]
    return [ByMagnitude(*map(tuple, zip(*(trim.magnitudes for trim in row), strict=True))) for row in rows]


def bounds(trims: Iterable[Trim]) -> tuple[Numbers, Words, Numbers, Words, Words]:
    """Of each source: low, its mark, high, its mark, rank."""
    rows = [
        (trim.low.magnitude, trim.low.mark, trim.high.magnitude, trim.high.mark, trim.num_smaller) for trim in trims
    ]
    lows, low_marks, highs, high_marks, ranks = zip(*rows, strict=True)
    return lows, low_marks, highs, high_marks, ranks


def factors(stored: Operands) -> Words:
    """The factor of each source by which equal magnitudes are ordered."""
    assert stored.orders is not None, "not given the orders of the sources"
    return tuple(order.factor for order in stored.orders)


def magnitudes(stored: Operands) -> tuple[Ranked, ...]:
    tables = tuple(table for table in stored.magnitudes or () if table is not None)
    assert len(tables) == len(stored.tensors), "not given the magnitudes of all sources"
    return tables


def cosine(stored: Operands) -> float:
    assert stored.cosine is not None, "the cosine was not given"
    return stored.cosine


def products(stored: Operands) -> Products:
    assert stored.products is not None, "the inner products were not given"
    return stored.products


def reductions() -> Any:
    """The kernels that reduce over elements, imported when they are needed: the compiler takes a second to import."""
    return importlib.import_module("workers.merging.kernels.reductions")
