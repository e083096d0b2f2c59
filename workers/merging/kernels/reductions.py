"""Sums and counts over tensors on CPU, in one pass, for methods whose coefficients depend on them; and checksums.

Sums are in float64 and in the order of `methods.arithmetic.total`, bit for bit, with any number of threads: a thread
starts at one of its blocks, and compiled functions write a sum for each block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workers.merging.kernels import rules
from workers.merging.kernels.arguments import as_array, as_arrays, typed
from workers.merging.kernels.compilation import compiled
from workers.merging.kernels.elements import BLOCK, NONE, SOME, is_between, marked, reaches, variance_of
from workers.merging.kernels.operations import ZERO, value
from workers.merging.kernels.sparsity import kept
from workers.merging.kernels.threads import pieces, run
from workers.merging.kernels.thresholds import decided
from workers.merging.kernels.thresholds import undecided as undecided_at
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
    b, norms = as_array(base), []
    for s, tensor in enumerate(tensors):
        alone = typed(sparse._replace(**{name: (each[s],) for name, each in sparse._asdict().items()}))
        sums = np.empty((2, -(-b.size // SUMMED)))
        run(_kept_norms, [(alone, b, as_array(tensor), sums, *part) for part in pieces(b.size, SUMMED)])
        norms.append((math.fsum(sums[0]), math.fsum(sums[1])))
    return norms


def variable_squares(trim: Trim, order: TieOrder, tensors: Tensors, base: torch.Tensor) -> tuple[Place, list[float]]:
    """The exact place in the order of variances, which lies where `trim` says, and for each source the sum of tau^2
    over the elements at it or above."""
    b, xs = as_array(base), as_arrays(tensors)
    sums = np.empty((len(xs), -(-b.size // SUMMED)))
    low, high = trim.low, trim.high
    bounds = low.magnitude, low.mark, high.magnitude, high.mark, trim.num_smaller
    rule = rules.Variable(*bounds, order.factor, (1.0,) * len(xs))
    parts = pieces(b.size, SUMMED)
    found = np.empty((len(parts), SPACING), np.int64)
    counts = run(
        _variable_squares,
        [(typed(rule), b, xs, sums, row, *part) for row, part in zip(found, parts, strict=True)],
    )
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        rule = decided(rule, b, xs, positions)
        starts = np.unique(positions // SUMMED) * SUMMED
        _variable_squares_at(typed(rule), b, xs, sums, found[0], starts)
    return Place(rule.high, rule.high_mark), [math.fsum(row) for row in sums]


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


@compiled
def _kept_norms(sparse: Any, base: Any, x: Any, sums: Any, start: int, stop: int) -> None:
    whole, left = np.empty(LANES), np.empty(LANES)
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        whole[:] = 0
        left[:] = 0
        for row in range(begin, end, U64(LANES)):
            for i in range(row, min(row + U64(LANES), end)):
                tau = value(x[i]) - value(base[i])
                whole[i - row] += np.float64(abs(tau))
                left[i - row] += np.float64(abs(kept(sparse, tau, 0, i)))
        sums[0, begin // U64(SUMMED)] = _sum_of(whole)
        sums[1, begin // U64(SUMMED)] = _sum_of(left)


@compiled
def _variable_squares(rule: Any, base: Any, xs: Any, sums: Any, found: Any, start: int, stop: int) -> int:
    """Positions of undecided elements are written to `found`. Returns how many."""
    num_found, lanes = 0, np.empty((len(xs), LANES))
    for begin in range(U64(start), U64(stop), U64(SUMMED)):
        end = min(begin + U64(SUMMED), U64(stop))
        lanes[:] = 0
        for row in range(begin, end, U64(LANES)):
            undecided, row_end = NONE, min(row + U64(LANES), end)
            for i in range(row, row_end):
                variance, mark = variance_of(base, xs, i), marked(i, rule.factor)
                undecided |= is_between(variance, mark, rule.low, rule.low_mark, rule.high, rule.high_mark)
                is_kept = reaches(variance, mark, rule.high, rule.high_mark)
                for s in range(len(xs)):
                    tau = np.float64(value(xs[s][i]) - value(base[i]) if is_kept else ZERO)
                    lanes[s, i - row] += tau * tau
            if undecided > NONE:
                for i in range(row, row_end):
                    if undecided_at(rule, base, xs, i) > NONE:
                        found[num_found] = i
                        num_found += 1
        for s in range(len(xs)):
            sums[s, begin // U64(SUMMED)] = _sum_of(lanes[s])
    return num_found


@compiled
def _variable_squares_at(rule: Any, base: Any, xs: Any, sums: Any, found: Any, starts: Any) -> None:
    for start in starts:
        _variable_squares(rule, base, xs, sums, found, start, min(start + SUMMED, base.size))


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
