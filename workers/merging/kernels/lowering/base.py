"""Decorator for functions that make the kernel rules of merge methods, and the statistics that these functions need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge
from workers.merging.kernels.rules import Rule, Trimmed, Words, bounds, comparisons
from workers.merging.methods.arithmetic import Products, num_kept
from workers.merging.methods.plain import Operands
from workers.merging.order_statistics import Ranked

__all__ = [
    "RULES",
    "Fused",
    "Lowering",
    "base",
    "cosine",
    "factors",
    "fuses",
    "magnitudes",
    "products",
    "trimmed",
]

Lowering = Callable[[Merge, Operands], Rule]


@dataclass(frozen=True)
class Fused:
    """A merge method's entry in the table of kernels: the function that makes its rule, and the devices with a kernel.

    A rule is the formula that a kernel executes, as plain data. `lowering` is the function that makes the rule for a
    merge from the merge's coefficients and operands. `is_on_cuda` says whether there is a kernel for these rules on
    CUDA. On the CPU there is always a kernel.
    """

    lowering: Lowering
    is_on_cuda: bool


# Complete once all modules of this package are imported.
RULES: dict[str, Fused] = {}


def fuses(name: str, *, is_on_cuda: bool = False) -> Callable[[Lowering], Lowering]:
    """Decorator for the function that makes the kernel rules of the merge method `name`.

    A rule is the formula that a kernel executes, as plain data. The function takes a merge and its operands, and
    returns the rule. `is_on_cuda` says whether CUDA, too, has a kernel for the rule. Raises ValueError if the package
    `search_spaces.methods` does not declare the method, or if a function is already registered for the method.
    """
    if name not in METHODS:
        raise ValueError(f"merge method {name!r} is not declared; declare it in a module of search_spaces/methods")
    if name in RULES:
        raise ValueError(f"{name} has a rule in {RULES[name].lowering.__module__} already; a method has at most one")

    def register(lowering: Lowering) -> Lowering:
        RULES[name] = Fused(lowering, is_on_cuda)
        return lowering

    return register


def trimmed(stored: Operands, shares: Sequence[float]) -> Trimmed:
    """The part of a kernel rule that keeps only the largest-magnitude elements of each task vector.

    `shares` has, for each source, the share of elements to keep. The other elements are set to zero. `stored` are the
    operands of the merge with their statistics. The thresholds come from the field `magnitudes` of `stored`, which has
    a table of the task vector's magnitudes for each source.
    """
    tables = zip(magnitudes(stored), shares, strict=True)
    trims = [table.trim(num_kept(share, table.num_elements)) for table, share in tables]
    (by,) = comparisons(trims)
    return Trimmed(by, *bounds(trims), factors(stored))


def base(stored: Operands) -> torch.Tensor:
    assert stored.base is not None, "the base was not given"
    return stored.base


def factors(stored: Operands) -> Words:
    """Numbers for computing tie-breaking marks in kernels, one for each source.

    Marks are hashes that order elements of equal magnitude, and so break ties at a threshold. The mark of an element is
    a hash of its index, times the source's factor (property `TieOrder.factor`), modulo 2^32. `stored` are the operands
    of the merge, whose field `orders` has the rule for each source.
    """
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
