"""Rules: formulas of merges as plain data; kernels on every device compute each element by a rule.

All methods that have a kernel reduce to these few rules. A rule consists of plain numbers; a few rules also have
tensors. Numbers for each source are tuples in the order of the sources. theta_s is source s, b is the base, and tau_s
is the task vector theta_s - b. Most rules first set some elements of each tau_s to zero; the field `sparse` of a rule
decides which elements.
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
    """Sparsification that keeps every element of a task vector.

    A sparsification is the part of a kernel's rule that says which elements of a task vector are kept.
    """


class ByMark(NamedTuple):
    """Comparison of elements with a threshold by magnitude and, for equal magnitudes, by a tie-breaking hash ("mark").

    Kernels compare elements in this way if many elements have the magnitude of the threshold. The module
    `workers.merging.order_statistics` defines marks.
    """


class ByMagnitude(NamedTuple):
    """Comparison of elements with a threshold by magnitude alone, which leaves a few elements undecided.

    Both fields have a number for each source s. An element of the source reaches the threshold if its magnitude is at
    least `aboves[s]`, and does not reach it if its magnitude is at most `belows[s]`. Elements with a magnitude between
    these two numbers are undecided; among them are all elements that have the threshold's magnitude.
    """

    belows: Numbers
    aboves: Numbers


Comparison = ByMark | ByMagnitude


class Trimmed(NamedTuple):
    """Sparsification that keeps the elements of each task vector whose magnitudes reach a threshold.

    A sparsification is the part of a kernel's rule that says which elements of a task vector are kept. A threshold is a
    magnitude with a tie-breaking mark, a number that orders elements of equal magnitude (class
    `order_statistics.Threshold`). Each threshold is known by a lower and an upper bound. If the bounds are equal, they
    are the threshold. Otherwise the threshold is the magnitude and mark of one of the elements strictly between the
    bounds. All fields except `by` have a number for each source:

    - `by`: how elements are compared with the threshold, by magnitude and mark (class `ByMark`) or by magnitude alone
      (class `ByMagnitude`)
    - `lows`, `low_marks`: the magnitude and mark of the lower bound
    - `highs`, `high_marks`: the magnitude and mark of the upper bound
    - `ranks`: the index of the threshold's element, if the elements between the bounds are sorted in ascending order
    - `factors`: the numbers from which the marks of elements are computed
    """

    by: Comparison
    lows: Numbers
    low_marks: Words
    highs: Numbers
    high_marks: Words
    ranks: Words
    factors: Words


class Between(NamedTuple):
    """Sparsification that keeps the elements of each task vector with magnitudes between two thresholds, inclusively.

    A sparsification is the part of a kernel's rule that says which elements of a task vector are kept. Each source has
    a lower and an upper threshold. A threshold is a magnitude with a tie-breaking mark, a number that orders elements
    of equal magnitude.

    Each threshold is stated by two bounds. If the bounds are equal, they are the threshold. Otherwise the threshold is
    the magnitude and mark of one of the elements strictly between them. These fields describe the lower threshold;
    those for the upper threshold begin with `top_`:

    - `by`: how elements are compared with the threshold: by magnitude and mark (class `ByMark`) or by magnitude alone
      (class `ByMagnitude`)
    - `lows`, `low_marks`: for each source, the magnitude and mark of the lower bound
    - `highs`, `high_marks`: for each source, the magnitude and mark of the upper bound
    - `ranks`: for each source, the index of the threshold's element, if the elements between the bounds are sorted in
      ascending order

    For both thresholds, `factors` has for each source the number from which the marks of elements are computed.
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
    """Sparsification that keeps random elements of each task vector, and multiplies them by a factor (DARE).

    A sparsification is the part of a kernel's rule that says which elements of a task vector are kept. All fields have
    a number for each source. `k0s` and `k1s` are the low and high 32 bits of the keys of random masks (module
    `workers.merging.masks`). An element is kept if its hash by the mask's key is at most the number in `bounds`.
    `scales` has the factors.
    """

    k0s: Words
    k1s: Words
    bounds: Words
    scales: Numbers


class Sampled(NamedTuple):
    """Sparsification of task vectors that keeps random elements, with a probability by the rank of their magnitude.

    All fields have an entry for each source.

    - `ranks`: the rank of each magnitude in its row, where the smallest magnitude has rank 0
    - `starts`, `origins`, `steps`: three numbers that give the probability of keeping an element from its rank: start +
      |rank - origin| step, in float64
    - `k0s`, `k1s`: the low and high 32 bits of the keys of random masks (module `workers.merging.masks`)
    - `scales`: the factor of kept elements
    - `is_divided`: whether kept elements are also divided by their probability (1) or not (0)
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
    """Rule for a merge kernel: the weighted sum of the sources themselves, without the base.

    The result is sum_s w_s theta_s. theta_s is source s, and w_s is its number in `weights`.
    """

    weights: Numbers


class TaskSum(NamedTuple):
    """Rule for a merge kernel: the weighted sum of the task vectors, to which the base is added last.

    The result is (sum_s w_s tau_s) + b. b is the base, tau_s is the difference of source s from the base, and w_s is
    its number in `weights`.
    """

    weights: Numbers


class Sum(NamedTuple):
    """Rule for a merge kernel: the base, to which the scaled task vectors are added one after another.

    The result is b + f_1 tau_1 + f_2 tau_2 + ..., added in this order. b is the base. tau_s is the task vector of
    source s after the sparsification in the field `sparse`, and f_s is the source's number in `factors`.
    """

    sparse: Sparsity
    factors: Numbers


class Mean(NamedTuple):
    """Rule for a merge kernel of TIES: the base plus the scaled mean of the task vectors with the elected sign.

    The rule is computed for each element. The mean is multiplied by `lambda_`. The elected sign is the sign of the sum
    of the task vectors, after the sparsification in the field `sparse`. Where this sum is zero, the result is the base.
    """

    sparse: Sparsity
    lambda_: float


class AgreeingSum(NamedTuple):
    """Rule for a merge kernel: TIES with a sum, instead of the mean, of the task vectors with the elected sign.

    The rule is computed for each element. The sum is multiplied by `lambda_` and added to the base. The elected sign is
    the sign of the sum of all task vectors, after the sparsification in the field `sparse`. Where this sum is zero, the
    result is the base.
    """

    sparse: Sparsity
    lambda_: float


class Weighted(NamedTuple):
    """Rule for a merge kernel: TIES with weights both in the election of signs and in the sum or mean.

    The rule is computed for each element. The result is the base plus `lambda_` times the sum or mean of the weighted
    task vectors that have the elected sign. A weighted task vector is a task vector, after the sparsification in the
    field `sparse`, times its number in `weights`. The elected sign is the sign of the sum of all weighted task vectors;
    it is positive if this sum is zero. If `normalize` is 1, the sum of the weighted task vectors that have the elected
    sign is divided by the sum of their weights.
    """

    sparse: Sparsity
    weights: Numbers
    lambda_: float
    normalize: float


class WeightedMean(NamedTuple):
    """Rule for a merge kernel: TIES with weights in the mean, but not in the election of signs (PEFT).

    The weighted sum of the task vectors that have the elected sign is divided by the number of these task vectors, and
    added to the base. The rule is computed for each element of the task vectors, after the sparsification in the field
    `sparse`. The elected sign is the sign of the unweighted sum of all task vectors; it is positive if this sum is
    zero.
    """

    sparse: Sparsity
    weights: Numbers


class Interpolation(NamedTuple):
    """Rule for a merge kernel: TIES with a weighted mean of the task vectors that have the elected sign.

    The method `m3_ties` has this rule: the base plus `lambda_` times the mean. The rule is computed for each element of
    the task vectors, after the sparsification in the field `sparse`. The elected sign is the sign of the sum of all
    task vectors. Where this sum is zero, the result is the base. The weights are divided by the sum of the weights of
    the task vectors that have the elected sign. If only one task vector has the elected sign, it is used instead of the
    mean, even if its weight is 0.
    """

    sparse: Sparsity
    weights: Numbers
    lambda_: float


class Agreed(NamedTuple):
    """Rule for a merge kernel: the base, plus the merged task vector where enough sources agree with it.

    Where at least `agreement` sources agree, the result is the base plus lambda m, with m the merged task vector and
    lambda the field `lambda_`. Elsewhere the result is the base. Source s agrees if |tau_s| >= w_s |m - tau_s|, where
    tau_s is the difference of the source from the base, and w_s is its number in `mask_lambdas`. If the field `sparse`
    is a Whole, which keeps every element, m is the sum of all tau_s. Otherwise m is the mean of those task vectors that
    have the sign of their sum, after the sparsification in the field `sparse`.
    """

    sparse: Sparsity
    lambda_: float
    mask_lambdas: Numbers
    agreement: float


class SharedOut(NamedTuple):
    """Rule for a merge kernel of RAM: the base plus the mean change of each element by the sources that changed it.

    A change is the difference of a source from the base. A source changed an element if the magnitude of the difference
    is above `epsilon`. If several sources changed an element, the mean of their changes is added to the base. If only
    one source changed it, this change is added, multiplied by the source's number in `factors`.
    """

    epsilon: float
    factors: Numbers


class Variable(NamedTuple):
    """Rule for a merge kernel of SCE: the base plus a weighted mean of task vectors at the most variable elements.

    The rule is computed for each element. If the variance of the element between the task vectors is below a threshold,
    the result is the base. Otherwise the result is the base plus the mean, with the weights `weights`, of the task
    vectors that have the elected sign. The elected sign is the sign of the sum of all task vectors; where this sum is
    zero, the result is the base.

    The threshold consists of the variance `threshold` and the tie-breaking mark `mark`. A mark is a number that orders
    elements of equal variance (module `workers.merging.order_statistics`); the marks of elements are computed from
    `factor`. `by` says whether elements are compared with the threshold by variance and mark (class `ByMark`), or by
    variance alone (class `ByMagnitude`).
    """

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers


class VariableElection(NamedTuple):
    """Rule for a merge kernel of SCE as in mergekit: a weighted mean of task vectors at the most variable elements.

    The rule is computed for each element. If the variance of the element between the task vectors is below a threshold,
    the result is the base. Otherwise the result is the base plus the mean, with the weights `weights`, of the task
    vectors that have the elected sign. The elected sign is the sign of the sum of all task vectors; it is positive if
    this sum is zero (in the rule `Variable`, the result is then the base). The divisor of the mean is the sum of the
    weights of the task vectors that have the elected sign, but at least `least` (in the rule `Variable`, it has no such
    limit).

    The threshold consists of the variance `threshold` and `mark`, a number that orders elements of equal variance; the
    marks of elements are computed from `factor`. `by` says whether elements are compared with the threshold by variance
    and mark, or by variance alone.
    """

    by: Comparison
    threshold: float
    mark: int
    factor: int
    weights: Numbers
    least: float


class Important(NamedTuple):
    """Rule for a kernel of Arcee Fusion, which takes important elements from the second of two sources.

    theta_1 and theta_2 are the two sources. `rows` has a number for each row. An element is important if |theta_2 -
    theta_1|, times the number of its row, is at least `threshold`; the product is computed in float32. The result has
    the important elements of theta_2, and all other elements of theta_1.
    """

    threshold: float
    rows: torch.Tensor


# A NamedTuple: one of the rules above, or one that a module of `lowering` defines together with its formula.
Rule = tuple[Any, ...]


def comparisons(*each: Iterable[Trim]) -> list[Comparison]:
    """Choose whether kernels compare elements with thresholds by magnitude alone, or by tie-breaking marks as well.

    Marks are hashes that order elements of equal magnitude. A rule has one or two thresholds for each source, a lower
    and an upper one for example. Each argument is for one kind of threshold, and contains one `Trim` per source. The
    result contains one comparison per argument. If at least one `Trim` is tied (field `Trim.is_tied`), all comparisons
    use magnitudes and marks (class `ByMark`). Otherwise all comparisons use magnitudes alone (class `ByMagnitude`).
    """
    rows = [list(trims) for trims in each]
    if any(trim.is_tied for row in rows for trim in row):
        return [ByMark() for _ in rows]
    return [ByMagnitude(*map(tuple, zip(*(trim.magnitudes for trim in row), strict=True))) for row in rows]


def bounds(trims: Iterable[Trim]) -> tuple[Numbers, Words, Numbers, Words, Words]:
    """Split the bounds of several sources' thresholds into the fields of a kernel rule, one tuple for each field.

    `trims` has, for each source, a lower and an upper bound of its threshold. The result contains the values of the
    fields `lows`, `low_marks`, `highs`, `high_marks` and `ranks` of the class `Trimmed`, in this order. Each value is a
    tuple with one number for each source.
    """
    rows = [
        (trim.low.magnitude, trim.low.mark, trim.high.magnitude, trim.high.mark, trim.num_smaller) for trim in trims
    ]
    lows, low_marks, highs, high_marks, ranks = zip(*rows, strict=True)
    return lows, low_marks, highs, high_marks, ranks
