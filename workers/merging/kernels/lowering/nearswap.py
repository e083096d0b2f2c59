"""NearSwap, whose rule no other method shares."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from search_spaces.recipe import Merge
from workers.merging.kernels.elements import ONE, larger, value
from workers.merging.kernels.formulas import computes
from workers.merging.kernels.lowering.base import fuses
from workers.merging.kernels.rules import Rule
from workers.merging.methods.plain import Operands

__all__ = ["Nearswap"]

NEAREST = np.float32(1e-6)  # the smallest distance that it divides by


class Nearswap(NamedTuple):
    """The first of two sources, moved towards the second by at most t."""

    t: float


@fuses("nearswap", is_on_cuda=True)
def _nearswap(merge: Merge, stored: Operands) -> Rule:
    return Nearswap(merge.number("t"))


@computes(Nearswap)
def _element(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    a, b = value(xs[0][i]), value(xs[1][i])
    share = ONE / larger(abs(a - b), NEAREST) * rule.t
    share = share if share < ONE else ONE
    return share * b + (ONE - share) * a
