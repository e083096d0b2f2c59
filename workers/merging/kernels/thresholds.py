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
from workers.merging.kernels.elements import NONE, hashed, is_between, value, variance_of
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
        sparse = rule.sparse
        found |= is_between(
            abs(value(xs[s][i]) - b),
            hashed(i, sparse.k0s[s], sparse.k1s[s]),
            sparse.lows[s],
            sparse.low_hashes[s],
            sparse.highs[s],
            sparse.high_hashes[s],
        )
    return found


def _undecided_between(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found = value(base[i]), NONE
    for s in range(len(xs)):
        sparse = rule.sparse
        size, mark = abs(value(xs[s][i]) - b), hashed(i, sparse.k0s[s], sparse.k1s[s])
        found |= is_between(size, mark, sparse.lows[s], sparse.low_hashes[s], sparse.highs[s], sparse.high_hashes[s])
        found |= is_between(
            size, mark, sparse.top_lows[s], sparse.top_low_hashes[s], sparse.top_highs[s], sparse.top_high_hashes[s]
        )
    return found


def _undecided_variance(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    mark = hashed(i, rule.k0, rule.k1)
    return is_between(variance_of(base, xs, i), mark, rule.low, rule.low_hash, rule.high, rule.high_hash)


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
    """The rule with exact places, from the elements at `positions`: all that were undecided."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        own = _hashes_at(positions, U32(rule.k0), U32(rule.k1))
        cut = rule.low, rule.low_hash, rule.high, rule.high_hash, rule.rank
        low, low_hash = _of_rank(_variances_at(base, xs, positions), own, cut)
        return rule._replace(low=low, low_hash=low_hash, high=low, high_hash=low_hash)
    sparse = rule.sparse
    sizes = [_magnitudes_at(base, x, positions) for x in xs]
    marks = [_hashes_at(positions, U32(k0), U32(k1)) for k0, k1 in zip(sparse.k0s, sparse.k1s, strict=True)]
    cuts = zip(sparse.lows, sparse.low_hashes, sparse.highs, sparse.high_hashes, sparse.ranks, strict=True)
    at, at_hash = zip(*(_of_rank(*each) for each in zip(sizes, marks, cuts, strict=True)), strict=True)
    sparse = sparse._replace(lows=at, low_hashes=at_hash, highs=at, high_hashes=at_hash)
    if isinstance(sparse, rules.Between):
        lows, highs = (sparse.top_lows, sparse.top_low_hashes), (sparse.top_highs, sparse.top_high_hashes)
        cuts = zip(*lows, *highs, sparse.top_ranks, strict=True)
        at, at_hash = zip(*(_of_rank(*each) for each in zip(sizes, marks, cuts, strict=True)), strict=True)
        sparse = sparse._replace(top_lows=at, top_low_hashes=at_hash, top_highs=at, top_high_hashes=at_hash)
    return rule._replace(sparse=sparse)


def _of_rank(sizes: np.ndarray, marks: np.ndarray, cut: tuple[float, int, float, int, int]) -> tuple[float, int]:
    """The magnitude and the hash of the place of a rank between two places; the second if they are equal."""
    low, low_hash, high, high_hash, rank = cut
    if (low, low_hash) == (high, high_hash):
        return high, high_hash
    is_above = (sizes > low) | ((sizes == low) & (marks > low_hash))
    is_below = (sizes < high) | ((sizes == high) & (marks < high_hash))
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
def _hashes_at(positions: Any, k0: Any, k1: Any) -> Any:
    marks = np.empty(positions.size, np.uint32)
    for at in range(positions.size):
        marks[at] = hashed(U64(positions[at]), k0, k1)
    return marks
