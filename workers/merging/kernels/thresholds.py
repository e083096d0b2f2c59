"""Exact magnitude thresholds, which decide whether a merge method keeps an element.

A table of magnitudes gives two bounds of a threshold, and only a few elements are between them. A merge kernel collects
these elements (function `undecided`); then the exact threshold is found among them (function `decided`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload

from workers.merging.kernels import rules
from workers.merging.kernels.compilation import IN_PLACE, compiled
from workers.merging.kernels.elements import NONE, SOME, either, marked, passes, reaches, turned_mark, variance_of
from workers.merging.kernels.operations import value
from workers.merging.order_statistics import MOST_LEFT, Threshold, TieOrder, Trim

__all__ = ["decided", "is_between", "most_undecided", "undecided", "variance_threshold"]

U32, U64 = np.uint32, np.uint64


def undecided(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    """SOME (1) if it is not known yet which sources keep element i, else NONE (0).

    A source keeps an element if its magnitude reaches the source's threshold. `rule` has the numbers of a merge's
    formula, with only a lower and an upper bound of each threshold. An element between the bounds of a source's
    threshold is undecided. `base` and `xs` are the arrays of the base and the sources. Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


@overload(undecided, jit_options=IN_PLACE)
def _undecided_of(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    fields = dict(zip(rule.instance_class._fields, rule.types, strict=True))
    return UNDECIDED.get(fields.get("sparse", rule).instance_class, _never_undecided)


def _never_undecided(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return NONE


def _undecided_trim(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found, sparse = value(base[i]), NONE, rule.sparse
    for s in range(len(xs)):
        size, factor = abs(value(xs[s][i]) - b), sparse.factors[s]
        low, high = (sparse.lows[s], sparse.low_marks[s]), (sparse.highs[s], sparse.high_marks[s])
        found = either(found, is_between(sparse.by, size, s, i, factor, low, high))
    return found


def _undecided_between(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found, sparse = value(base[i]), NONE, rule.sparse
    for s in range(len(xs)):
        size, factor = abs(value(xs[s][i]) - b), sparse.factors[s]
        low, high = (sparse.lows[s], sparse.low_marks[s]), (sparse.highs[s], sparse.high_marks[s])
        found = either(found, is_between(sparse.by, size, s, i, factor, low, high))
        low, high = (sparse.top_lows[s], sparse.top_low_marks[s]), (sparse.top_highs[s], sparse.top_high_marks[s])
        found = either(found, is_between(sparse.top_by, size, s, i, factor, low, high))
    return found


def is_between(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, high: Any) -> Any:
    """SOME (1) if element i of source s is, or may be, strictly between two thresholds, else NONE (0).

    The thresholds are `low` and `high`, each (magnitude, mark). Marks order elements of equal magnitude: the mark of
    element i is a hash of i times `factor`. `size` is the element's magnitude. `by` says how the element is compared
    with the thresholds. The class `ByMark` compares magnitude and mark. The class `ByMagnitude` compares the magnitude
    alone; an element for which this is not sufficient counts as between. Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


@overload(is_between, jit_options=IN_PLACE)
def _between_by(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, high: Any) -> Any:
    return _between_magnitudes if by.instance_class is rules.ByMagnitude else _between_thresholds


def _between_magnitudes(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, high: Any) -> Any:
    return SOME if (size > by.belows[s]) & (size < by.aboves[s]) else NONE


def _between_thresholds(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, high: Any) -> Any:
    mark = turned_mark(i, factor)
    return SOME if passes(size, mark, low[0], low[1]) & (not reaches(size, mark, high[0], high[1])) else NONE


UNDECIDED: dict[type, Callable[..., Any]] = {rules.Trimmed: _undecided_trim, rules.Between: _undecided_between}


def most_undecided(rule: Any) -> int:
    """Upper limit for the number of a tensor's undecided elements; memory for them is allocated in advance.

    `rule`, the numbers of a merge's formula, has a lower and an upper bound of each of its thresholds. Elements between
    the bounds are undecided until the exact threshold is found. There are at most MOST_LEFT undecided elements (a
    constant) for each threshold. The result is 0 for a rule without thresholds.
    """
    sparse = getattr(rule, "sparse", None)
    if isinstance(sparse, rules.Trimmed | rules.Between):
        return MOST_LEFT * len(sparse.lows) * (2 if isinstance(sparse, rules.Between) else 1)
    return 0


def decided(rule: Any, base: np.ndarray, xs: tuple[np.ndarray, ...], positions: np.ndarray) -> Any:
    """Copy of a rule with exact thresholds, so that no element is undecided.

    A rule has the numbers of a merge's formula. In `rule`, a threshold is known only by a lower and an upper bound.
    Whether elements between the bounds are kept is undecided until the exact threshold is known. `positions` has the
    indices of all elements that are between the bounds of any threshold. `base` and `xs` are the arrays of the base and
    the sources.
    """
    sparse = rule.sparse
    sizes = [_magnitudes_at(base, x, positions) for x in xs]
    marks = [_marks_at(positions, U32(factor)) for factor in sparse.factors]
    bounds = zip(sparse.lows, sparse.low_marks, sparse.highs, sparse.high_marks, sparse.ranks, strict=True)
    at, at_mark = zip(*(_of_rank(*each) for each in zip(sizes, marks, bounds, strict=True)), strict=True)
    sparse = sparse._replace(by=rules.ByMark(), lows=at, low_marks=at_mark, highs=at, high_marks=at_mark)
    if isinstance(sparse, rules.Between):
        lows, highs = (sparse.top_lows, sparse.top_low_marks), (sparse.top_highs, sparse.top_high_marks)
        bounds = zip(*lows, *highs, sparse.top_ranks, strict=True)
        at, at_mark = zip(*(_of_rank(*each) for each in zip(sizes, marks, bounds, strict=True)), strict=True)
        sparse = sparse._replace(
            top_by=rules.ByMark(), top_lows=at, top_low_marks=at_mark, top_highs=at, top_high_marks=at_mark
        )
    return rule._replace(sparse=sparse)


def variance_threshold(
    trim: Trim, order: TieOrder, base: np.ndarray, xs: tuple[np.ndarray, ...], positions: np.ndarray
) -> tuple[Threshold, bool]:
    """Find the exact threshold for variances, from a lower and an upper bound (merge method SCE).

    The variance of an element is computed over its values in the task vectors, the differences of `xs` from `base`. The
    threshold is a variance and a mark. Marks break ties between elements of equal variance; they are hashes of the
    elements' indices, computed by `order`. `trim` has the two bounds. `positions` are the indices of the undecided
    elements: all elements strictly between the bounds and, if variances were compared without marks, all elements with
    the threshold's variance.

    Returns the threshold, and whether every element of `positions` with the threshold's variance reaches the threshold.
    If all these elements reach the threshold, later comparisons need no marks.
    """
    sizes, marks = _variances_at(base, xs, positions), _marks_at(positions, U32(order.factor))
    bounds = trim.low.magnitude, trim.low.mark, trim.high.magnitude, trim.high.mark, trim.num_smaller
    threshold = Threshold(*_of_rank(sizes, marks, bounds))
    return threshold, not np.any((sizes == threshold.magnitude) & (marks < threshold.mark))


def _of_rank(sizes: np.ndarray, marks: np.ndarray, cut: tuple[float, int, float, int, int]) -> tuple[float, int]:
    """Find the element of a given rank between two bounds; return its magnitude and tie-breaking hash ("mark").

    The elements to choose from have the magnitudes `sizes` and the marks `marks`. `cut` is (magnitude of the lower
    bound, its mark, magnitude of the upper bound, its mark, rank). Rank 0 is the smallest of the elements strictly
    between the bounds. If the bounds are equal, the result is the bound.
    """
    low, low_mark, high, high_mark, rank = cut
    if (low, low_mark) == (high, high_mark):
        return high, high_mark
    is_above = (sizes > low) | ((sizes == low) & (marks > low_mark))
    is_below = (sizes < high) | ((sizes == high) & (marks < high_mark))
    places = np.flatnonzero(is_above & is_below)
    at = places[np.lexsort((marks[places], sizes[places]))[rank]]
    return float(sizes[at]), int(marks[at])


@compiled
def _magnitudes_at(base: Any, x: Any, positions: Any) -> Any:
    sizes = np.empty(positions.size, np.float32)
    for at in range(positions.size):
        i = positions[at]
        sizes[at] = abs(value(x[i]) - value(base[i]))
    return sizes


@compiled
def _variances_at(base: Any, xs: Any, positions: Any) -> Any:
    variances = np.empty(positions.size, np.float32)
    for at in range(positions.size):
        variances[at] = variance_of(base, xs, U64(positions[at]))
    return variances


@compiled
def _marks_at(positions: Any, factor: Any) -> Any:
    marks = np.empty(positions.size, np.uint32)
    for at in range(positions.size):
        marks[at] = marked(U64(positions[at]), factor)
    return marks
