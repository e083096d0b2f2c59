"""Rules: what a fused pass computes of each element. The merge methods reduce to these few, for every backend.

A rule is plain numbers; per-source ones are tuples in the order of the sources. b is the base and tau_s the difference
of source s from it. Most rules first make the tau_s sparse, by their field `sparse`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch

from workers.merging.order_statistics import Trim

__all__ = [
    "Agreed",
    "AgreeingSum",
    "Between",
    "ByMagnitude",
    "ByMark",
    "Comparison",
    "Doubles",
    "Dropped",
    "Important",
    "Interpolation",
    "Mean",
    "Numbers",
    "Rule",
    "Sampled",
    "SharedOut",
    "Sparsity",
    "Sum",
    "TaskSum",
    "Tensors",
    "Trimmed",
    "Variable",
    "VariableElection",
    "Weighted",
    "WeightedMean",
    "WeightedSum",
    "Whole",
    "Words",
    "bounds",
    "comparisons",
]

Numbers = tuple[float, ...]
Words = tuple[int, ...]
Tensors = tuple[torch.Tensor, ...]
Doubles = tuple[np.float64, ...]


class Whole(NamedTuple):
    """Every element of every tau."""


class ByMark(NamedTuple):
    """Marks are compared where magnitudes are equal: so many elements have that of a place."""


class ByMagnitude(NamedTuple):
    """Magnitudes alone are compared: elements from `aboves` on are at a place or above, those between `belows` and
    `aboves` are undecided. These are few, and the pass collects all that have the magnitude of a place."""

    belows: Numbers
    aboves: Numbers


Comparison = ByMark | ByMagnitude


class Trimmed(NamedTuple):
    """The elements at a place (`order_statistics.Threshold`) or above: at `highs` with `high_marks` if `lows` with
    `low_marks` equal it, else at the one of `ranks` (from 0, ascending) of the places strictly between the two, which
    the pass collects. `factors` are those of marks."""

    by: Comparison
    lows: Numbers
    low_marks: Words
    highs: Numbers
    high_marks: Words
    ranks: Words
    factors: Words


class Between(NamedTuple):
    """`Trimmed`, and of these the elements at a second place or below, given likewise."""

    by: Comparison
    lows: Numbers
    low_marks: Words
    highs: Numbers
    high_marks: Words
    ranks: Words
    factors: Words
    top_by: Comparison
    top_lows: Numbers
    top_low_marks: Words
    top_highs: Numbers
    top_high_marks: Words
    top_ranks: Words


class Dropped(NamedTuple):
    """Elements kept at random (`workers.merging.masks`; `bounds` are the thresholds less one), times `scales`."""

    k0s: Words
    k1s: Words
    bounds: Words
    scales: Numbers


class Sampled(NamedTuple):
    """Elements kept at random (`masks`) with a probability that depends on rank, start + |rank - origin| step, in
    float64. They are divided by it if `is_divided` is 1, and multiplied by `scales`. `ranks` is a tensor per source."""

    k0s: Words
    k1s: Words
    ranks: Tensors
    origins: Words
    starts: Doubles
    steps: Doubles
    is_divided: Numbers
    scales: Numbers


Sparsity = Whole | Trimmed | Between | Dropped | Sampled


class WeightedSum(NamedTuple):
    """sum_s w_s theta_s, without the base."""

    weights: Numbers


class TaskSum(NamedTuple):
    """(sum_s w_s tau_s) + b."""

    weights: Numbers


class Sum(NamedTuple):
    """b + f_1 tau_1 + f_2 tau_2 + ..., added in this order."""

    sparse: Sparsity
    factors: Numbers


class Mean(NamedTuple):
    """b + lambda times the mean of the tau_s that have the sign of their sum; b if the sum is zero."""

    sparse: Sparsity
    lambda_: float


class AgreeingSum(NamedTuple):
    """`Mean`, but the sum of the tau_s that agree."""

    sparse: Sparsity
    lambda_: float


class Weighted(NamedTuple):
    """b + lambda times the sum of the w_s tau_s that have the sign of their sum, + if it is zero; divided by the sum of
    the weights of those that agree if `normalize` is 1."""

    sparse: Sparsity
    weights: Numbers
    lambda_: float
    normalize: float


class WeightedMean(NamedTuple):
    """b plus the weighted sum of the tau_s that have the sign of their sum, + if it is zero, over their number."""

    sparse: Sparsity
    weights: Numbers


class Interpolation(NamedTuple):
    """`Mean`, but weighted by w_s / (sum of the weights of those that agree); a single tau_s is kept as it is."""

    sparse: Sparsity
    weights: Numbers
    lambda_: float


class Agreed(NamedTuple):
    """b + lambda m if at least `agreement` of |tau_s| >= w_s |m - tau_s| hold, else b; m is the sum of the tau_s if
    `sparse` is `Whole`, else the mean of `Mean`."""

    sparse: Sparsity
    lambda_: float
    mask_lambdas: Numbers
    agreement: float


class SharedOut(NamedTuple):
    """b plus the sum of the tau_s of a magnitude above epsilon, divided by their number; a single tau_s is multiplied
    by its factor."""

    epsilon: float
    factors: Numbers


class Variable(NamedTuple):
    """b plus the mean, weighted by w_s, of the tau_s that have the sign of their sum, if the variance of all tau_s is
    at a place or above in the order of variances; else b. `by` leaves none undecided; `factor` is that of marks."""

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers


class VariableElection(NamedTuple):
    """`Variable`, but + is elected if the sum is zero, and the divisor is at least `least`."""

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers
    least: float


class Important(NamedTuple):
    """The first of two sources, with the second's elements where |theta_2 - theta_1| times the number of their row in
    `rows`, float32, is at least a threshold."""

    threshold: float
    rows: torch.Tensor


# A NamedTuple: one of these, or one that a module of `lowering` defines together with its formula.
Rule = tuple[Any, ...]


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
