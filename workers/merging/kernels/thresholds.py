"""Thresholds that a `MagnitudeTable` leaves open: they are found among the few elements that they could be.

A pass notes the elements that are `undecided`, between the bounds that the table gives; `decided` makes the exact
threshold of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload

from workers.merging.kernels import rules
from workers.merging.kernels.compilation import IN_PLACE, compiled
from workers.merging.kernels.elements import NONE, is_between, is_within, marked, variance_of
from workers.merging.kernels.operations import value
from workers.merging.order_statistics import SPACING

__all__ = ["decided", "most_undecided", "undecided"]

U32, U64 = np.uint32, np.uint64


def undecided(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    """SOME if element i lies between the bounds of a threshold of `rule`, else NONE. Only in compiled code."""
    raise NotImplementedError("only in compiled code")


@overload(undecided, jit_options=IN_PLACE)
def _undecided_of(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    fields = dict(zip(rule.instance_class._fields, rule.types, strict=True))
    return UNDECIDED.get(fields.get("sparse", rule).instance_class, _never_undecided)


def _never_undecided(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return NONE


def _undecided_trim(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found = value(base[i]), NONE
    for s in range(len(xs)):
        found |= is_within(abs(value(xs[s][i]) - b), rule.sparse.lows[s], rule.sparse.highs[s])
    return found


def _undecided_trim_tied(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found, sparse = value(base[i]), NONE, rule.sparse
    for s in range(len(xs)):
        size, mark = abs(value(xs[s][i]) - b), marked(i, sparse.factors[s])
        found |= is_between(size, mark, sparse.lows[s], sparse.low_marks[s], sparse.highs[s], sparse.high_marks[s])
    return found


def _undecided_between(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found = value(base[i]), NONE
    for s in range(len(xs)):
        size = abs(value(xs[s][i]) - b)
        found |= is_within(size, rule.sparse.lows[s], rule.sparse.highs[s])
        found |= is_within(size, rule.sparse.top_lows[s], rule.sparse.top_highs[s])
    return found


def _undecided_between_tied(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found, sparse = value(base[i]), NONE, rule.sparse
    for s in range(len(xs)):
        size, mark = abs(value(xs[s][i]) - b), marked(i, sparse.factors[s])
        found |= is_between(size, mark, sparse.lows[s], sparse.low_marks[s], sparse.highs[s], sparse.high_marks[s])
        found |= is_between(
            size, mark, sparse.top_lows[s], sparse.top_low_marks[s], sparse.top_highs[s], sparse.top_high_marks[s]
        )
    return found


def _undecided_variance(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    mark = marked(i, rule.factor)
    return is_between(variance_of(base, xs, i), mark, rule.low, rule.low_mark, rule.high, rule.high_mark)


UNDECIDED: dict[type, Callable[..., Any]] = {
    rules.Trimmed: _undecided_trim,
    rules.TrimmedTied: _undecided_trim_tied,
    rules.Between: _undecided_between,
    rules.BetweenTied: _undecided_between_tied,
    rules.Variable: _undecided_variance,
    rules.VariableElection: _undecided_variance,
}


def most_undecided(rule: Any) -> int:
    """The most elements of a tensor that a rule can leave undecided: fewer than SPACING for each threshold."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        return SPACING
    sparse = getattr(rule, "sparse", None)
    if isinstance(sparse, rules.Trimmed | rules.TrimmedTied):
        return SPACING * len(sparse.lows)
    if isinstance(sparse, rules.Between | rules.BetweenTied):
        return 2 * SPACING * len(sparse.lows)
    return 0


def decided(rule: Any, base: np.ndarray, xs: tuple[np.ndarray, ...], positions: np.ndarray) -> Any:
    """The rule with exact places, from the elements at `positions`: all that were undecided."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        own = _marks_at(positions, U32(rule.factor))
        cut = rule.low, rule.low_mark, rule.high, rule.high_mark, rule.rank
        low, low_mark = _of_rank(_variances_at(base, xs, positions), own, cut)
        return rule._replace(low=low, low_mark=low_mark, high=low, high_mark=low_mark)
    sparse = rule.sparse
    sizes = [_magnitudes_at(base, x, positions) for x in xs]
    marks = [_marks_at(positions, U32(factor)) for factor in sparse.factors]
    cuts = zip(sparse.lows, sparse.low_marks, sparse.highs, sparse.high_marks, sparse.ranks, strict=True)
    found = [_of_rank(*each) for each in zip(sizes, marks, cuts, strict=True)]
    at, at_mark = zip(*found, strict=True)
    sparse = sparse._replace(lows=at, low_marks=at_mark, highs=at, high_marks=at_mark)
    if isinstance(sparse, rules.Between | rules.BetweenTied):
        lows, highs = (sparse.top_lows, sparse.top_low_marks), (sparse.top_highs, sparse.top_high_marks)
        cuts = zip(*lows, *highs, sparse.top_ranks, strict=True)
        found += (top := [_of_rank(*each) for each in zip(sizes, marks, cuts, strict=True)])
        at, at_mark = zip(*top, strict=True)
        sparse = sparse._replace(top_lows=at, top_low_marks=at_mark, top_highs=at, top_high_marks=at_mark)
    # Every element that may have the magnitude of one of the places is among these.
    if any(np.count_nonzero(each == place) > 1 for each in sizes for place, _ in found):
        sparse = TIED.get(type(sparse), type(sparse))(*sparse)
    return rule._replace(sparse=sparse)


TIED: dict[type, type] = {rules.Trimmed: rules.TrimmedTied, rules.Between: rules.BetweenTied}


def _of_rank(sizes: np.ndarray, marks: np.ndarray, cut: tuple[float, int, float, int, int]) -> tuple[float, int]:
    """The magnitude and the mark of the place of a rank between two places; the second if they are equal."""
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
