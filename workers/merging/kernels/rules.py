"""Rules: the formulas by which kernels compute each element of a merge, on every device.

All methods that have a kernel reduce to these few rules. A rule consists of plain numbers, and a few rules have
tensors; numbers per source are tuples in the order of the sources. theta_s is source s, b the base, and tau_s their
difference theta_s - b. Most rules first set some elements of each tau_s to zero; their field `sparse` decides which.
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
    """Sparsification of task vectors that keeps every element."""


class ByMark(NamedTuple):
    """Kind of comparison with a threshold: by magnitude, and by the tie-breaking mark if magnitudes are equal.

    It is used if many elements have the magnitude of the threshold. `workers.merging.order_statistics` defines marks.
    """


class ByMagnitude(NamedTuple):
    """Kind of comparison with a threshold: by magnitude alone, which leaves a few elements undecided.

    Elements with a magnitude of `aboves` or more are at the threshold or above, and elements with a magnitude of
    `belows` or less are below it. The elements between the two are undecided; they include all elements that have the
    threshold's magnitude. Both fields have a number for each source.
    """

    belows: Numbers
    aboves: Numbers


Comparison = ByMark | ByMagnitude


class Trimmed(NamedTuple):
    """Sparsification that keeps the elements of each task vector at a threshold or above.

    Each source has a threshold: a magnitude with a tie-breaking mark (`order_statistics.Threshold`). It is known by two
    bounds: `lows` with `low_marks`, and `highs` with `high_marks`. If the bounds are equal, they are the threshold.
    Otherwise the threshold is at an element strictly between them: the element with the index `ranks` among these
    elements, from 0 in ascending order. `factors` determine the elements' marks. `by` says how elements are compared
    with the threshold: by magnitude and mark (`ByMark`), or by magnitude alone (`ByMagnitude`). All fields but `by`
    have a number for each source.
    """

    by: Comparison
    lows: Numbers
    low_marks: Words
    highs: Numbers
    high_marks: Words
    ranks: Words
    factors: Words


class Between(NamedTuple):
    """Sparsification that keeps the elements of each task vector between two thresholds, both included.

    Each source has a lower threshold and an upper one, whose fields begin with `top_`. A threshold is known by two
    bounds, magnitudes with tie-breaking marks: `lows` with `low_marks`, and `highs` with `high_marks`. If the bounds
    differ, the threshold is at the element with the index `ranks` among the elements strictly between them, in
    ascending order. `by` says how elements are compared with the threshold (`ByMark` or `ByMagnitude`). `factors`
    determine the marks of elements.
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
    """Sparsification that keeps elements of task vectors at random, and multiplies them by `scales`.

    The random masks are those of `workers.merging.masks`. `k0s` and `k1s` are the low and high 32 bits of the masks'
    keys. An element is kept if its hash is at most the number in `bounds`. All fields have a number for each source.
    """

    k0s: Words
    k1s: Words
    bounds: Words
    scales: Numbers


class Sampled(NamedTuple):
    """Sparsification that keeps elements at random, with a probability that depends on the rank of their magnitude.

    The probability is start + |rank - origin| step, in float64, with start, origin and step for each source. `ranks`
    has a tensor for each source: the rank of each magnitude in its row, from 0 for the smallest. The random masks are
    those of `workers.merging.masks`; `k0s` and `k1s` are the low and high 32 bits of the masks' keys. Elements that are
    kept are divided by their probability if `is_divided` is 1, and multiplied by `scales`.
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
    """Rule: the weighted sum of the sources, sum_s w_s theta_s, without the base.

    theta_s is source s, and w_s its weight.
    """

    weights: Numbers


class TaskSum(NamedTuple):
    """Rule: the base plus a weighted sum of task vectors, (sum_s w_s tau_s) + b, where the base is added last.

    b is the base, tau_s the difference of source s from the base, and w_s its weight.
    """

    weights: Numbers


class Sum(NamedTuple):
    """Rule: the base plus task vectors times factors, b + f_1 tau_1 + f_2 tau_2 + ..., added in this order.

    b is the base, tau_s the task vector of source s after the sparsification `sparse`, and f_s its number in `factors`.
    """

    sparse: Sparsity
    factors: Numbers


class Mean(NamedTuple):
    """Rule: the base plus lambda times the mean of the sparse task vectors that have the elected sign.

    This is computed for each element. The elected sign is the sign of the sum of the task vectors after the
    sparsification `sparse`. Where the sum is zero, the result is the base.
    """

    sparse: Sparsity
    lambda_: float


class AgreeingSum(NamedTuple):
    """Rule: the base plus lambda times the sum of the sparse task vectors that have the elected sign.

    This is computed for each element. The elected sign is the sign of the sum of all task vectors after the
    sparsification `sparse`. Where this sum is zero, the result is the base.
    """

    sparse: Sparsity
    lambda_: float


class Weighted(NamedTuple):
    """Rule: the base plus lambda times the sum of the weighted task vectors that have the elected sign.

    This is computed for each element of the task vectors after the sparsification `sparse`, times their `weights`. The
    elected sign is that of the sum of all weighted task vectors, and positive if this sum is zero. If `normalize` is 1,
    the sum is divided by the sum of the weights of the task vectors that have the sign.
    """

    sparse: Sparsity
    weights: Numbers
    lambda_: float
    normalize: float


class WeightedMean(NamedTuple):
    """Rule: base + (weighted sum of the task vectors that have the elected sign) / (number of these task vectors).

    This is computed for each element of the task vectors after the sparsification `sparse`. The elected sign is that of
    the unweighted sum of all task vectors, and positive if this sum is zero.
    """

    sparse: Sparsity
    weights: Numbers


class Interpolation(NamedTuple):
    """Rule: the base plus lambda times the weighted mean of the task vectors that have the elected sign.

    This is computed for each element of the task vectors after the sparsification `sparse`. The elected sign is that of
    the sum of all task vectors; where the sum is zero, the result is the base. The weights are divided by the sum of
    the weights of the task vectors that have this sign. If only one task vector has this sign, it takes the place of
    the mean.
    """

    sparse: Sparsity
    weights: Numbers
    lambda_: float


class Agreed(NamedTuple):
    """Rule: the base plus lambda m if enough sources agree with the merged task vector m, else the base.

    This is computed for each element. Source s agrees if |tau_s| >= w_s |m - tau_s|, with tau_s its difference from the
    base and w_s its number in `mask_lambdas`; at least `agreement` sources must agree. m is the sum of all tau_s if
    `sparse` is `Whole`, else the mean of the sparse task vectors as in the rule `Mean`.
    """

    sparse: Sparsity
    lambda_: float
    mask_lambdas: Numbers
    agreement: float


class SharedOut(NamedTuple):
    """Rule: the base plus, for each element, the mean of those task vectors whose magnitude is above `epsilon`.

    If only one source is above `epsilon` in an element, this source's task vector is multiplied by its number in
    `factors`.
    """

    epsilon: float
    factors: Numbers


class Variable(NamedTuple):
    """Rule: the base plus a weighted mean of task vectors if their variance reaches a threshold, else the base.

    This is computed for each element. The mean is over the task vectors that have the sign of their sum. The threshold
    is the variance `threshold` with the tie-breaking mark `mark`. `by` is the comparison that decides for every element
    whether its variance reaches the threshold; `factor` gives the marks of elements.
    """

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers


class VariableElection(NamedTuple):
    """Rule of mergekit's SCE: the base plus a weighted mean of task vectors where their variance reaches a threshold.

    For all other elements, the result is the base. The mean is over the task vectors that have the sign of their sum; a
    sum of zero counts as positive. The divisor of the mean, a sum of weights, is at least `least`. The threshold is the
    variance `threshold` with the tie-breaking mark `mark`. `by` is the comparison that decides for every element
    whether its variance reaches the threshold; `factor` gives the marks of elements.
    """

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers
    least: float


class Important(NamedTuple):
    """Rule: the first of two sources, with the important elements of the second.

    An element is important if |theta_2 - theta_1| times the number of its row in `rows`, in float32, is at least
    `threshold`. theta_1 and theta_2 are the two sources.
    """

    threshold: float
    rows: torch.Tensor


# A NamedTuple: one of the rules above, or one that a module of `lowering` defines together with its formula.
Rule = tuple[Any, ...]


def comparisons(*each: Iterable[Trim]) -> list[Comparison]:
    """Choose the kind of comparison of elements with thresholds, for each list in `each`.

    A list describes one threshold for each source, as a `Trim`. If many elements may have the magnitude of one of the
    thresholds (`Trim.is_tied`), all comparisons use tie-breaking marks (`ByMark`); otherwise they use magnitudes alone
    (`ByMagnitude`).
    """
    rows = [list(trims) for trims in each]
    if any(trim.is_tied for row in rows for trim in row):
        return [ByMark() for _ in rows]
    return [ByMagnitude(*map(tuple, zip(*(trim.magnitudes for trim in row), strict=True))) for row in rows]


def bounds(trims: Iterable[Trim]) -> tuple[Numbers, Words, Numbers, Words, Words]:
    """The two bounds of each source's threshold, in the form of the fields of `Trimmed`.

    The result has the values of the fields `lows`, `low_marks`, `highs`, `high_marks` and `ranks`, in this order. Each
    value has one number for each source, from the source's entry in `trims`.
    """
    rows = [
        (trim.low.magnitude, trim.low.mark, trim.high.magnitude, trim.high.mark, trim.num_smaller) for trim in trims
    ]
    lows, low_marks, highs, high_marks, ranks = zip(*rows, strict=True)
    return lows, low_marks, highs, high_marks, ranks
