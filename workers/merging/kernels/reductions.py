"""CPU reductions over tensors in one pass (sums, counts, checksums), for methods whose coefficients need them.

Sums are in float64, in the order of the function `methods.arithmetic.total`, and so have the same bits. The number of
threads changes no bit, because each block of elements has a sum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch

from workers.merging.kernels import rules
from workers.merging.kernels.arguments import as_array, as_arrays, typed
from workers.merging.kernels.compilation import IN_PLACE, compiled
from workers.merging.kernels.elements import BLOCK, NONE, SOME, either, variance_of, zero_unless
from workers.merging.kernels.operations import ZERO, value
from workers.merging.kernels.sparsity import is_at_or_above, kept
from workers.merging.kernels.threads import pieces, run
from workers.merging.kernels.thresholds import is_between, variance_threshold
from workers.merging.methods.arithmetic import BLOCK as SUMMED
from workers.merging.methods.arithmetic import PARTS
from workers.merging.order_statistics import MOST_LEFT, Threshold, TieOrder, Trim

__all__ = ["inner_product", "kept_norms", "projections", "shared_counts", "variable_squares", "weighted_words"]

LANES = SUMMED // PARTS
U64 = np.uint64
Tensors = Sequence[torch.Tensor]


def inner_product(first: torch.Tensor, second: torch.Tensor, base: torch.Tensor | None) -> float:
    """Inner product of the contiguous CPU tensors `first` and `second` or, with `base`, of their differences from it.

    The result has the same bits as the result of the function `methods.arithmetic.inner_products`.
    """
    x, y = as_array(first), as_array(second)
    b = x if base is None else as_array(base.contiguous())
    sums = np.empty(-(-x.size // SUMMED))
    run(_inner_product, [(x, y, b, base is not None, sums, *part) for part in pieces(x.size, SUMMED)])
    return math.fsum(sums)


def projections(direction: torch.Tensor, tensors: Tensors, base: torch.Tensor) -> list[float]:
    """The inner product of `direction` with each of `tensors` minus `base`, in the order of `tensors`.

    The differences are rounded to float32 and not stored. All tensors are contiguous and on CPU; `direction` may have
    another dtype than the other tensors.
    """
    *xs, b = as_arrays([*tensors, base])
    sums = np.empty((len(xs), -(-b.size // SUMMED)))
    d = as_array(direction)
    run(_projections, [(d, tuple(xs), b, sums, *part) for part in pieces(b.size, SUMMED)])
    return [math.fsum(row) for row in sums]


def kept_norms(
    sparse: rules.Whole | rules.Dropped | rules.Sampled, tensors: Tensors, base: torch.Tensor
) -> list[float]:
    """The L1 norm of each source's task vector after the sparsification `sparse`: the sum of the kept magnitudes.

    `tensors` are the sources. `sparse` says which elements of a task vector (source - base) are kept, and by which
    factor kept elements are multiplied.
    """
    fields = sparse._asdict().items()
    alone = tuple(typed(sparse._replace(**{name: (each[s],) for name, each in fields})) for s in range(len(tensors)))
    b, xs = as_array(base), as_arrays(tensors)
    sums = np.empty((len(xs), -(-b.size // SUMMED)))
    run(_kept_norms, [(alone, b, xs, sums, *part) for part in pieces(b.size, SUMMED)])
    return [math.fsum(row) for row in sums]


def variable_squares(
    trim: Trim, order: TieOrder, tensors: Tensors, base: torch.Tensor
) -> tuple[rules.Comparison, Threshold, list[float]]:
    """Sum the squares of each task vector over the elements that vary most between the task vectors (merge method SCE).

    Task vectors are the differences of `tensors`, the sources, from `base`. The variance of an element is computed over
    its values in all task vectors. An element is included if its variance is at a threshold or above it.

    - `trim`: a lower and an upper bound of the threshold; the exact threshold is found here
    - `order`: the rule that breaks ties between elements of equal variance

    Returns three values:

    - how a kernel has to compare elements with the threshold: by variance alone, or by variance and tie-breaking mark
    - the exact threshold
    - for each source, the sum of the squares of the included elements of its task vector
    """
    b, xs = as_array(base), as_arrays(tensors)
    sums = np.empty((len(xs), -(-b.size // SUMMED)))
    (by,) = rules.comparisons([trim])
    parts = pieces(b.size, SUMMED)
    found = np.empty((len(parts), MOST_LEFT), np.int64)
    spread = _spread(by, trim.low, trim.high, order)
    counts = run(_variable_squares, [(spread, b, xs, sums, row, *part) for row, part in zip(found, parts, strict=True)])
    threshold = trim.high
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        threshold, is_lowest = variance_threshold(trim, order, b, xs, positions)
        starts = np.unique(positions // SUMMED) * SUMMED
        exact = _spread(rules.ByMark(), threshold, threshold, order)
        _variable_squares_at(exact, b, xs, sums, found[0], starts)
        if isinstance(by, rules.ByMagnitude):
            by = rules.ByMagnitude((threshold.magnitude,), (threshold.magnitude,)) if is_lowest else rules.ByMark()
    return by, threshold, [math.fsum(row) for row in sums]


class _Spread(NamedTuple):
    """Lower and upper bound of a threshold for variances, as arguments of compiled code.

    The lower bound is the variance `low` with the tie-breaking mark `low_mark`; the upper bound is `high` with
    `high_mark`. A mark is a number that orders elements of equal variance, and `factor` is the number from which the
    elements' marks are computed. `by` says how an element is compared with the threshold: by variance and mark (class
    `ByMark`), or by variance alone (class `ByMagnitude`).
    """

    by: Any
    low: Any
    low_mark: Any
    high: Any
    high_mark: Any
    factor: Any


def _spread(by: rules.Comparison, low: Threshold, high: Threshold, order: TieOrder) -> _Spread:
    words = np.uint32(low.mark), np.uint32(high.mark), np.uint32(order.factor)
    return _Spread(typed(by), np.float32(low.magnitude), words[0], np.float32(high.magnitude), *words[1:])


def shared_counts(epsilon: float, tensors: Tensors, base: torch.Tensor) -> list[tuple[int, int]]:
    """Count, for each source, the elements that it changes, and the elements that it alone changes.

    A source changes an element if the magnitude of its difference from `base` is above `epsilon`. `tensors` are the
    sources. The result contains a pair for each source: (number of changed elements, number of elements that only this
    source changes).
    """
    b, xs = as_array(base), as_arrays(tensors)
    parts = pieces(b.size, BLOCK)
    counts = np.zeros((len(parts), 2, len(xs)), np.int64)
    run(_shared_counts, [(b, xs, np.float32(epsilon), row, *part) for row, part in zip(counts, parts, strict=True)])
    changed, alone = counts.sum(axis=0).tolist()
    return list(zip(changed, alone, strict=True))


def weighted_words(words: torch.Tensor, weight: int) -> int:
    """A checksum of a tensor's bytes: the sum over i of words[i] * (i * weight | 1), modulo 2^64.

    `words` are the bytes as contiguous int64. The factor i * weight | 1 differs between words, so that exchanging two
    words changes the sum. The operator | is a bitwise or, so every factor is odd.
    """
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


# Numbers in float32 are written to a buffer first, and added in float64 in a loop of their own: one loop for both would
# compute only as many float32 numbers at a time as float64 numbers fit into a vector register. A buffer has one row of
# lanes, to stay in the first-level cache beside the sources.


@compiled
def _kept_norms(alone: Any, base: Any, xs: Any, sums: Any, start: int, stop: int) -> None:
    sizes, lanes = np.empty(LANES, np.float32), np.empty(LANES)
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        for s in range(len(xs)):  # all read one block of the base while it is in the cache
            sparse, x = alone[s], xs[s]
            lanes[:] = 0
            for row in range(begin, end, U64(LANES)):
                last = min(row + U64(LANES), end)
                for i in range(row, last):
                    sizes[i - row] = abs(kept(sparse, value(x[i]) - value(base[i]), 0, i))
                for lane in range(U64(0), last - row):
                    lanes[lane] += np.float64(sizes[lane])
            sums[s, begin // U64(SUMMED)] = _sum_of(lanes)


@compiled
def _variable_squares(spread: Any, base: Any, xs: Any, sums: Any, found: Any, start: int, stop: int) -> int:
    """Sum each task vector's squares over the elements in [start, stop) whose variance reaches a threshold.

    Task vectors are the differences of the sources `xs` from `base`. The variance of an element is computed over its
    values in all task vectors. `spread` has a lower and an upper bound of the threshold. Elements between the bounds
    cannot be decided yet: they are not added, but their positions are written to the array `found`. The array `sums`
    [sources, blocks] gets a sum for each source and block of elements. Returns the number of undecided elements.
    """
    num_found, taus, lanes = 0, np.empty((len(xs), LANES), np.float32), np.empty((len(xs), LANES))
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        lanes[:] = 0
        for row in range(begin, end, U64(LANES)):
            last = min(row + U64(LANES), end)
            is_any_undecided = NONE
            for i in range(row, last):
                variance = variance_of(base, xs, i)
                is_any_undecided = either(is_any_undecided, _undecided(spread, variance, i))
                is_kept = is_at_or_above(spread.by, variance, 0, i, spread.factor, spread.high, spread.high_mark)
                for s in range(len(xs)):
                    taus[s, i - row] = zero_unless(is_kept, value(xs[s][i]) - value(base[i]))
            if is_any_undecided > NONE:
                for i in range(row, last):
                    if _undecided(spread, variance_of(base, xs, i), i) > NONE:
                        found[num_found] = i
                        num_found += 1
            for s in range(len(xs)):
                for lane in range(U64(0), last - row):
                    tau = np.float64(taus[s, lane])
                    lanes[s, lane] += tau * tau
        for s in range(len(xs)):
            sums[s, begin // U64(SUMMED)] = _sum_of(lanes[s])
    return num_found


@numba.njit(**IN_PLACE)
def _undecided(spread: Any, variance: Any, i: Any) -> Any:
    low, high = (spread.low, spread.low_mark), (spread.high, spread.high_mark)
    return is_between(spread.by, variance, 0, i, spread.factor, low, high)


@compiled
def _variable_squares_at(spread: Any, base: Any, xs: Any, sums: Any, found: Any, starts: Any) -> None:
    for start in starts:
        _variable_squares(spread, base, xs, sums, found, start, min(start + SUMMED, base.size))


@compiled
def _sum_of(lanes: Any) -> Any:
    """The total of the partial sums in the array `lanes`, added in a fixed order.

    The array is overwritten.
    """
    size = U64(LANES // PARTS)
    while size > U64(0):
        for lane in range(U64(0), size):
            total = lanes[lane]
            for part in range(1, PARTS):
                total += lanes[U64(part) * size + lane]
            lanes[lane] = total
        size //= U64(PARTS)
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
