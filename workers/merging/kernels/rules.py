"""Rules: what a fused kernel computes for each element, for every backend.

All fused methods reduce to these few rules. A rule is plain numbers; numbers per source are tuples in the order of the
sources. theta_s is source s, b the base, and tau_s their difference theta_s - b. Most rules first make the tau_s
sparse, by their field `sparse`.
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
    """Sparsity that keeps every element of every task vector."""


class ByMark(NamedTuple):
    """Comparison with a threshold by magnitude, and by mark where magnitudes are equal.

    It is used where many elements have the magnitude of a threshold.
    """


class ByMagnitude(NamedTuple):
    """Comparison with a threshold by magnitude alone, which leaves a few elements undecided.

    Elements from `aboves` on are at the threshold or above; those between `belows` and `aboves` are undecided. The pass
    collects the undecided elements, which include all that have the magnitude of the threshold.
    """

    belows: Numbers
    aboves: Numbers


Comparison = ByMark | ByMagnitude


class Trimmed(NamedTuple):
    """Sparsity that keeps the elements at a threshold (`order_statistics.Threshold`) or above.

    The threshold is at `highs` with `high_marks`, if `lows` with `low_marks` equal it. Otherwise it is that of an
    element strictly between the two, the one with the index `ranks` (from 0, ascending) among those that the pass
    collects there. `factors` are those of marks.
    """

    by: Comparison
    lows: Numbers
    low_marks: Words
    highs: Numbers
    high_marks: Words
    ranks: Words
    factors: Words


class Between(NamedTuple):
    """Sparsity that keeps the elements between two thresholds, both included.

    The fields of the upper threshold begin with `top_`. The fields of both are those of `Trimmed`.
    """

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
    """Sparsity that keeps elements at random, multiplied by `scales`.

    Masks are those of `workers.merging.masks`; `bounds` are their thresholds minus one.
    """

    k0s: Words
    k1s: Words
    bounds: Words
    scales: Numbers


class Sampled(NamedTuple):
    """Sparsity that keeps elements at random, with a probability that depends on their rank.

    The probability is start + |rank - origin| step, in float64; masks are those of `workers.merging.masks`. Kept
    elements are divided by the probability if `is_divided` is 1, and multiplied by `scales`. `ranks` is a tensor per
    source.
    """

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
    """The weighted sum of the sources, without the base: sum_s w_s theta_s."""

    weights: Numbers


class TaskSum(NamedTuple):
    """The base plus a weighted sum of task vectors, added last: (sum_s w_s tau_s) + b."""

    weights: Numbers


class Sum(NamedTuple):
    """The base plus task vectors times factors: b + f_1 tau_1 + f_2 tau_2 + ..., added in this order."""

    sparse: Sparsity
    factors: Numbers


class Mean(NamedTuple):
    """The base plus lambda times the mean of the task vectors that have the sign of their sum.

    It is the base where the sum is zero.
    """

    sparse: Sparsity
    lambda_: float


class AgreeingSum(NamedTuple):
    """The base plus lambda times the sum of the task vectors that have the sign of their sum.

    It is the base where the sum is zero.
    """

    sparse: Sparsity
    lambda_: float


class Weighted(NamedTuple):
    """The base plus lambda times the sum of the weighted task vectors that have the sign of their sum.

    A sum of zero counts as positive. If `normalize` is 1, the sum is divided by the weights of those that agree.
    """

    sparse: Sparsity
    weights: Numbers
    lambda_: float
    normalize: float


class WeightedMean(NamedTuple):
    """The base plus the weighted sum of the task vectors that have the sign of their sum, divided by their number.

    A sum of zero counts as positive.
    """

    sparse: Sparsity
    weights: Numbers


class Interpolation(NamedTuple):
    """`Mean` with weights, except that a task vector which alone has the sign is kept as it is.

    The weights are w_s / (sum of the weights of those that agree).
    """

    sparse: Sparsity
    weights: Numbers
    lambda_: float


class Agreed(NamedTuple):
    """The base plus lambda m where enough sources agree with the merged task vector m, else the base.

    Source s agrees if |tau_s| >= w_s |m - tau_s|, with w_s of `mask_lambdas`; at least `agreement` sources must. m is
    the sum of the tau_s if `sparse` is `Whole`, else the mean of `Mean`.
    """

    sparse: Sparsity
    lambda_: float
    mask_lambdas: Numbers
    agreement: float


class SharedOut(NamedTuple):
    """The base plus the mean of the task vectors whose magnitude is above epsilon, element by element.

    A tau_s that alone is above epsilon is multiplied by its factor instead.
    """

    epsilon: float
    factors: Numbers


class Variable(NamedTuple):
    """The base plus a weighted mean of task vectors where their variance is at a threshold or above; else the base.

    The mean is of the tau_s that have the sign of their sum. `threshold` and `mark` are in the order of variances. `by`
    leaves no element undecided; `factor` is that of marks.
    """

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers


class VariableElection(NamedTuple):
    """`Variable` in which a sum of zero counts as positive and the divisor is at least `least`."""

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers
    least: float


class Important(NamedTuple):
    """The first of two sources, with the important elements of the second.

    Those are the elements where |theta_2 - theta_1| times the number of their row in `rows`, float32, is at least
    `threshold`.
    """

    threshold: float
    rows: torch.Tensor


# A NamedTuple: one of the rules above, or one that a module of `lowering` defines together with its formula.
Rule = tuple[Any, ...]


def comparisons(*each: Iterable[Trim]) -> list[Comparison]:
    """The kind of comparison with thresholds for each list of bounds: by marks for all, or by magnitudes for all."""
    rows = [list(trims) for trims in each]
    if any(trim.is_tied for row in rows for trim in row):
        return [ByMark() for _ in rows]
    return [ByMagnitude(*map(tuple, zip(*(trim.magnitudes for trim in row), strict=True))) for row in rows]


def bounds(trims: Iterable[Trim]) -> tuple[Numbers, Words, Numbers, Words, Words]:
    """The bounds of each source's threshold, as fields of `Trimmed`: lows, their marks, highs, their marks, ranks."""
    rows = [
        (trim.low.magnitude, trim.low.mark, trim.high.magnitude, trim.high.mark, trim.num_smaller) for trim in trims
    ]
    lows, low_marks, highs, high_marks, ranks = zip(*rows, strict=True)
    return lows, low_marks, highs, high_marks, ranks
