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
from workers.merging.kernels.elements import NONE, is_between, value, variance_of
from workers.merging.order_statistics import SPACING

__all__ = ["decided", "most_undecided", "undecided"]

U64 = np.uint64


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
        found |= is_between(abs(value(xs[s][i]) - b), rule.sparse.lows[s], rule.sparse.highs[s])
    return found


def _undecided_between(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found = value(base[i]), NONE
    for s in range(len(xs)):
        size = abs(value(xs[s][i]) - b)
        found |= is_between(size, rule.sparse.lows[s], rule.sparse.highs[s])
        found |= is_between(size, rule.sparse.top_lows[s], rule.sparse.top_highs[s])
    return found


def _undecided_variance(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return is_between(variance_of(base, xs, i), rule.low, rule.high)


UNDECIDED: dict[type, Callable[..., Any]] = {
    rules.Trimmed: _undecided_trim,
    rules.Between: _undecided_between,
    rules.Variable: _undecided_variance,
    rules.VariableElection: _undecided_variance,
}


def most_undecided(rule: Any) -> int:
    """The most elements of a tensor that a rule can leave undecided: fewer than SPACING for each threshold."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        return SPACING
    sparse = getattr(rule, "sparse", None)
    if isinstance(sparse, rules.Trimmed | rules.Between):
        return SPACING * len(sparse.lows) * (2 if isinstance(sparse, rules.Between) else 1)
    return 0


def decided(rule: Any, base: np.ndarray, xs: tuple[np.ndarray, ...], positions: np.ndarray) -> Any:
    """The rule with exact thresholds, from the elements at `positions`: all that were undecided."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        variances = _variances_at(base, xs, positions)
        exact = _of_rank(variances, rule.low, rule.high, rule.rank)
        return rule._replace(low=exact, high=exact)
    sparse = rule.sparse
    sizes = [_magnitudes_at(base, x, positions) for x in xs]
    bottom = tuple(map(_of_rank, sizes, sparse.lows, sparse.highs, sparse.ranks))
    sparse = sparse._replace(lows=bottom, highs=bottom)
    if isinstance(sparse, rules.Between):
        top = tuple(map(_of_rank, sizes, sparse.top_lows, sparse.top_highs, sparse.top_ranks))
        sparse = sparse._replace(top_lows=top, top_highs=top)
    return rule._replace(sparse=sparse)


def _of_rank(sizes: np.ndarray, low: float, high: float, rank: int) -> float:
    return high if low == high else float(np.sort(sizes[(sizes > low) & (sizes < high)])[rank])


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
