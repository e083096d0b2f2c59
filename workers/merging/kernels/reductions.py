"""Sums and counts over tensors on CPU, in one pass, for methods whose coefficients depend on them; and checksums.

Sums are in float64 and in the order of `methods.arithmetic.total`, bit for bit, with any number of threads: a thread
starts at one of its blocks, and compiled functions write a sum for each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from workers.merging.kernels import rules
from workers.merging.kernels.arguments import as_array, as_arrays, typed
from workers.merging.kernels.compilation import compiled
from workers.merging.kernels.elements import BLOCK, NONE, SOME, either, passes, reaches, turned_mark, variance_of
from workers.merging.kernels.operations import ZERO, value
from workers.merging.kernels.sparsity import kept
from workers.merging.kernels.threads import pieces, run
from workers.merging.kernels.thresholds import place_of_variance
from workers.merging.methods.arithmetic import BLOCK as SUMMED
from workers.merging.methods.arithmetic import PARTS
from workers.merging.order_statistics import SPACING, Place, TieOrder, Trim

__all__ = ["inner_product", "kept_norms", "projections", "shared_counts", "variable_squares", "weighted_words"]

LANES = SUMMED // PARTS
U64 = np.uint64
Tensors = Sequence[torch.Tensor]


def inner_product(first: torch.Tensor, second: torch.Tensor, base: torch.Tensor | None) -> float:
    """The inner product of two contiguous tensors, or of their differences from `base`, as `methods.inner_products`
    computes it."""
    x, y = as_array(first), as_array(second)
    b = x if base is None else as_array(base.contiguous())
    sums = np.empty(-(-x.size // SUMMED))
    run(_inner_product, [(x, y, b, base is not None, sums, *part) for part in pieces(x.size, SUMMED)])
    return math.fsum(sums)


def projections(direction: torch.Tensor, tensors: Tensors, base: torch.Tensor) -> list[float]:
    """The inner products of `direction` and each tensor's difference from `base`, which is rounded to float32; all
    contiguous, `direction` in a dtype of its own. No difference is held in memory."""
    *xs, b = as_arrays([*tensors, base])
    sums = np.empty((len(xs), -(-b.size // SUMMED)))
    d = as_array(direction)
    run(_projections, [(d, tuple(xs), b, sums, *part) for part in pieces(b.size, SUMMED)])
    return [math.fsum(row) for row in sums]


def kept_norms(
    sparse: rules.Dropped | rules.Sampled, tensors: Tensors, base: torch.Tensor
) -> list[tuple[float, float]]:
    """For each source, with tau = source - base: the sum of |tau|, and the sum of |what `sparse` keeps of tau|."""
    fields = sparse._asdict().items()
    alone = tuple(typed(sparse._replace(**{name: (each[s],) for name, each in fields})) for s in range(len(tensors)))
    b, xs = as_array(base), as_arrays(tensors)
    sums = np.empty((2, len(xs), -(-b.size // SUMMED)))
    run(_kept_norms, [(alone, b, xs, sums, *part) for part in pieces(b.size, SUMMED)])
    return [(math.fsum(whole), math.fsum(left)) for whole, left in zip(*sums, strict=True)]


def variable_squares(trim: Trim, order: TieOrder, tensors: Tensors, base: torch.Tensor) -> tuple[Place, list[float]]:
    """The exact place in the order of variances, which lies where `trim` says, and for each source the sum of tau^2
    over the elements at it or above."""
    b, xs = as_array(base), as_arrays(tensors)
    sums = np.empty((len(xs), -(-b.size // SUMMED)))
    low, high = trim.low, trim.high
    bounds = low.magnitude, low.mark, high.magnitude, high.mark
    spread = _spread(*bounds, order.factor)
    parts = pieces(b.size, SUMMED)
    found = np.empty((len(parts), SPACING), np.int64)
    counts = run(_variable_squares, [(spread, b, xs, sums, row, *part) for row, part in zip(found, parts, strict=True)])
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        place = place_of_variance((*bounds, trim.num_smaller), order.factor, b, xs, positions)
        starts = np.unique(positions // SUMMED) * SUMMED
        _variable_squares_at(_spread(*place, *place, order.factor), b, xs, sums, found[0], starts)
        high = Place(*place)
    return high, [math.fsum(row) for row in sums]


class _Spread(NamedTuple):
    """Between which places in the order of variances the one from which on elements are selected lies."""

    low: Any
    low_mark: Any
    high: Any
    high_mark: Any
    factor: Any


def _spread(low: float, low_mark: int, high: float, high_mark: int, factor: int) -> _Spread:
    return _Spread(np.float32(low), np.uint32(low_mark), np.float32(high), np.uint32(high_mark), np.uint32(factor))


def shared_counts(epsilon: float, tensors: Tensors, base: torch.Tensor) -> list[tuple[int, int]]:
    """For each source how many elements it changes by more than epsilon, and how many of these no other source does."""
    b, xs = as_array(base), as_arrays(tensors)
    parts = pieces(b.size, BLOCK)
    counts = np.zeros((len(parts), 2, len(xs)), np.int64)
    run(_shared_counts, [(b, xs, np.float32(epsilon), row, *part) for row, part in zip(counts, parts, strict=True)])
    changed, alone = counts.sum(axis=0).tolist()
    return list(zip(changed, alone, strict=True))


def weighted_words(words: torch.Tensor, weight: int) -> int:
    """sum_i words[i] * (i * weight | 1) modulo 2^64, of contiguous int64 words."""
    array = words.view(-1).numpy().view(np.uint64)
    sums = run(_weighted_words, [(array, U64(weight), *part) for part in pieces(array.size, BLOCK)])
    return sum(map(int, sums)) % 2**64


@compiled
def _inner_product(x: Any, y: Any, base: Any, has_base: bool, sums: Any, start: int, stop: int) -> None:
    lanes = np.empty(LANES)
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        lanes[:] = 0
        for row in range(begin, end, U64(LANES)):
            for i in range(row, min(row + U64(LANES), end)):
                b = value(base[i]) if has_base else ZERO
                lanes[i - row] += np.float64(value(x[i]) - b) * np.float64(value(y[i]) - b)
        sums[begin // U64(SUMMED)] = _sum_of(lanes)


@compiled
def _projections(direction: Any, xs: Any, base: Any, sums: Any, start: int, stop: int) -> None:
    lanes = np.empty(LANES)
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        for s in range(len(xs)):  # all read one block of the direction and the base while it is in the cache
            x = xs[s]
            lanes[:] = 0
            for row in range(begin, end, U64(LANES)):
                for i in range(row, min(row + U64(LANES), end)):
                    lanes[i - row] += np.float64(value(direction[i])) * np.float64(value(x[i]) - value(base[i]))
            sums[s, begin // U64(SUMMED)] = _sum_of(lanes)


# Numbers in float32 go to a buffer first, and are added in float64 in a loop of their own: in one loop, as many float32
# would be computed at a time as there is room for float64.


@compiled
def _kept_norms(alone: Any, base: Any, xs: Any, sums: Any, start: int, stop: int) -> None:
    whole, left, lanes = np.empty(SUMMED, np.float32), np.empty(SUMMED, np.float32), np.empty(LANES)
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        whole[np.int64(end - begin) :] = ZERO
        left[np.int64(end - begin) :] = ZERO
        for s in range(len(xs)):  # all read one block of the base while it is in the cache
            sparse, x = alone[s], xs[s]
            for i in range(begin, end):
                tau = value(x[i]) - value(base[i])
                whole[i - begin] = abs(tau)
                left[i - begin] = abs(kept(sparse, tau, 0, i))
            sums[0, s, begin // U64(SUMMED)] = _sum_of_block(whole, lanes)
            sums[1, s, begin // U64(SUMMED)] = _sum_of_block(left, lanes)


@compiled
def _variable_squares(spread: Any, base: Any, xs: Any, sums: Any, found: Any, start: int, stop: int) -> int:
    """Positions of undecided elements are written to `found`. Returns how many."""
    num_found, taus, lanes = 0, np.empty((len(xs), SUMMED), np.float32), np.empty(LANES)
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        taus[:, np.int64(end - begin) :] = ZERO
        is_any_undecided = NONE
        for i in range(begin, end):
            variance, mark = variance_of(base, xs, i), turned_mark(i, spread.factor)
            is_kept = reaches(variance, mark, spread.high, spread.high_mark)
            is_open = passes(variance, mark, spread.low, spread.low_mark) & (not is_kept)
            is_any_undecided = either(is_any_undecided, SOME if is_open else NONE)
            for s in range(len(xs)):
                taus[s, i - begin] = value(xs[s][i]) - value(base[i]) if is_kept else ZERO
        if is_any_undecided > NONE:
            for i in range(begin, end):
                variance, mark = variance_of(base, xs, i), turned_mark(i, spread.factor)
                is_kept = reaches(variance, mark, spread.high, spread.high_mark)
                if passes(variance, mark, spread.low, spread.low_mark) and not is_kept:
                    found[num_found] = i
                    num_found += 1
        for s in range(len(xs)):
            sums[s, begin // U64(SUMMED)] = _sum_of_squares(taus[s], lanes)
    return num_found


# The number of lanes is that of the array: a loop of a known number of steps would be unrolled, and not vectorised.


@compiled
def _sum_of_block(numbers: Any, lanes: Any) -> Any:
    """The sum of SUMMED float32 numbers; `lanes` is scratch memory."""
    size = U64(lanes.size)
    for lane in range(U64(0), size):
        total = np.float64(numbers[lane])
        for row in range(1, PARTS):
            total += np.float64(numbers[lane + U64(row) * size])
        lanes[lane] = total
    return _sum_of(lanes)


@compiled
def _sum_of_squares(numbers: Any, lanes: Any) -> Any:
    """The sum of the squares of SUMMED float32 numbers; `lanes` is scratch memory."""
    size = U64(lanes.size)
    for lane in range(U64(0), size):
        total = np.float64(0)
        for row in range(PARTS):
            number = np.float64(numbers[lane + U64(row) * size])
            total += number * number
        lanes[lane] = total
    return _sum_of(lanes)


@compiled
def _variable_squares_at(spread: Any, base: Any, xs: Any, sums: Any, found: Any, starts: Any) -> None:
    for start in starts:
        _variable_squares(spread, base, xs, sums, found, start, min(start + SUMMED, base.size))


@compiled
def _sum_of(lanes: Any) -> Any:
    """The sum of the lanes, which are overwritten."""
    size = LANES // PARTS
    while size > 0:
        for part in range(1, PARTS):
            for lane in range(size):
                lanes[lane] += lanes[part * size + lane]
        size //= PARTS
    return lanes[0]


@compiled
def _shared_counts(base: Any, xs: Any, epsilon: Any, counts: Any, start: int, stop: int) -> None:
    changed, alone = np.zeros((len(xs), BLOCK), np.uint32), np.zeros((len(xs), BLOCK), np.uint32)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        for i in range(begin, min(begin + U64(BLOCK), U64(stop))):
            b, count = value(base[i]), NONE
            for s in range(len(xs)):
                count += SOME if abs(value(xs[s][i]) - b) > epsilon else NONE
            for s in range(len(xs)):
                is_changed = SOME if abs(value(xs[s][i]) - b) > epsilon else NONE
                changed[s, i - begin] += is_changed
                alone[s, i - begin] += is_changed if count == SOME else NONE
    for s in range(len(xs)):
        counts[0, s], counts[1, s] = changed[s].sum(), alone[s].sum()


@compiled
def _weighted_words(words: Any, weight: Any, start: int, stop: int) -> Any:
    total = U64(0)
    for i in range(U64(start), U64(stop)):
        total += words[i] * ((i * weight) | U64(1))
    return total
