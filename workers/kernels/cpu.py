"""Fused merge kernels for CPU: one pass over the operands, no temporaries, bit for bit the plain methods.

Each compiled function handles elements `start` to `stop` - 1 of flat arrays, with the operations of
`workers.merge_methods` in their order; Numba makes one for each number of sources and their dtypes. The pieces run in
threads of our own, as many as torch uses: elements do not depend on each other, so their number changes no bit.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Any, TypeVar

import numba
import numpy as np
import torch

from workers.kernels.elements import as_array, compiled, copied_past_caches, rounded, stores_done, value
from workers.magnitudes import SPACING, Trim
from workers.masks import MULTIPLIERS, STEP, key_words, threshold

__all__ = [
    "dare_linear",
    "dare_ties",
    "each_in_one_thread",
    "nearswap",
    "ram",
    "task_arithmetic",
    "ties",
    "weighted_sum",
    "weighted_task_sum",
    "weighted_words",
]

# A smaller piece is not worth waking a thread for.
MIN_PIECE = 1 << 16  # elements
# Results are made in blocks, which stay in the first cache, and go from there to where they shall be. In TIES undecided
# elements are looked for one by one only in blocks that have any.
BLOCK = 256  # elements

T = TypeVar("T")
Tensors = Sequence[torch.Tensor]
U32 = np.uint32
U64 = np.uint64
ZERO, ONE, NEAREST = np.float32(0), np.float32(1), np.float32(1e-6)
NONE, SOME = U32(0), U32(1)
_local = threading.local()  # is_alone: this thread merges one of many small tensors
WEYL, FIRST, SECOND = U32(STEP), U32(MULTIPLIERS[0]), U32(MULTIPLIERS[1])


def weighted_sum(tensors: Tensors, out: torch.Tensor, *, weights: Sequence[float]) -> None:
    """Write `merge_methods.arithmetic.weighted_sum` to `out`."""
    xs, merged = _arrays(tensors), as_array(out)
    _run(_weighted_sum, [(xs, _floats(weights), merged, *piece) for piece in _pieces(merged.size)])


def weighted_task_sum(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, weights: Sequence[float]) -> None:
    """Write `merge_methods.arithmetic.weighted_sum` of the task vectors, plus the base, to `out`."""
    b, xs, merged = as_array(base), _arrays(tensors), as_array(out)
    _run(_weighted_task_sum, [(b, xs, _floats(weights), merged, *piece) for piece in _pieces(merged.size)])


def nearswap(tensors: Tensors, out: torch.Tensor, *, t: float) -> None:
    """Write `merge_methods.averages.nearswap` to `out`."""
    (first, second), merged = _arrays(tensors), as_array(out)
    _run(_nearswap, [(first, second, np.float32(t), merged, *piece) for piece in _pieces(merged.size)])


def ram(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, epsilon: float) -> None:
    """Write `merge_methods.competition.ram` to `out`."""
    b, xs, merged = as_array(base), _arrays(tensors), as_array(out)
    _run(_ram, [(b, xs, np.float32(epsilon), merged, *piece) for piece in _pieces(merged.size)])


def task_arithmetic(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, lambdas: Sequence[float]) -> None:
    """Write `merge_methods.task_arithmetic` to `out`."""
    b, xs, merged = as_array(base), _arrays(tensors), as_array(out)
    _run(_task_arithmetic, [(b, xs, _floats(lambdas), merged, *piece) for piece in _pieces(merged.size)])


def ties(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, lambda_: float, trims: Sequence[Trim]) -> None:
    """Write `merge_methods.ties` to `out`, `trims` saying what of each task vector is kept.

    What they leave undecided is collected in the pass and merged once it is known.
    """
    b, xs, merged, scale = as_array(base), _arrays(tensors), as_array(out), np.float32(lambda_)
    lows, highs = _floats(trim.low for trim in trims), _floats(trim.high for trim in trims)
    pieces = _pieces(merged.size)
    found = np.empty((len(pieces), len(xs) * SPACING), np.int64)
    counts = _run(
        _ties,
        [(b, xs, lows, highs, scale, merged, row, *piece) for row, piece in zip(found, pieces, strict=True)],
    )
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        smaller = tuple(np.int64(trim.num_smaller) for trim in trims)
        exact = _floats(_thresholds(b, xs, lows, highs, smaller, positions))
        _ties_at(b, xs, exact, scale, merged, found[0], positions)


def dare_linear(
    tensors: Tensors,
    base: torch.Tensor,
    out: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    keys: Sequence[int],
) -> None:
    """Write `merge_methods.dare_linear` to `out`, of fewer than 2^32 elements."""
    b, xs, merged, masks = as_array(base), _arrays(tensors), as_array(out), _masks(keys, densities)
    factors = _floats(lambda_ / density for lambda_, density in zip(lambdas, densities, strict=True))
    _run(_dare_linear, [(b, xs, *masks, factors, merged, *piece) for piece in _pieces(merged.size)])


def dare_ties(
    tensors: Tensors,
    base: torch.Tensor,
    out: torch.Tensor,
    *,
    lambda_: float,
    densities: Sequence[float],
    keys: Sequence[int],
) -> None:
    """Write `merge_methods.dare_ties` to `out`, of fewer than 2^32 elements."""
    b, xs, merged, masks = as_array(base), _arrays(tensors), as_array(out), _masks(keys, densities)
    scale, rescales = np.float32(lambda_), _floats(1 / density for density in densities)
    _run(_dare_ties, [(b, xs, *masks, rescales, scale, merged, *piece) for piece in _pieces(merged.size)])


def weighted_words(words: torch.Tensor, weight: int) -> int:
    """sum_i words[i] * (i * weight | 1) modulo 2^64, of contiguous int64 words."""
    array = words.view(-1).numpy().view(np.uint64)
    sums = _run(_weighted_words, [(array, U64(weight), *piece) for piece in _pieces(array.size)])
    return sum(map(int, sums)) % 2**64


# Indices are unsigned: a signed one could count from the end, and the check for that keeps loops from being vectorised.


@compiled
def _weighted_sum(xs: Any, weights: Any, out: Any, start: int, stop: int) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            total = value(xs[0][i]) * weights[0]
            for s in range(1, len(xs)):
                total += value(xs[s][i]) * weights[s]
            block[i - begin] = rounded(total, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _weighted_task_sum(base: Any, xs: Any, weights: Any, out: Any, start: int, stop: int) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            b = value(base[i])
            total = (value(xs[0][i]) - b) * weights[0]
            for s in range(1, len(xs)):
                total += (value(xs[s][i]) - b) * weights[s]
            block[i - begin] = rounded(total + b, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _task_arithmetic(base: Any, xs: Any, lambdas: Any, out: Any, start: int, stop: int) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            b = value(base[i])
            total = b
            for s in range(len(xs)):
                total += (value(xs[s][i]) - b) * lambdas[s]
            block[i - begin] = rounded(total, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _nearswap(first: Any, second: Any, t: Any, out: Any, start: int, stop: int) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            a, b = value(first[i]), value(second[i])
            distance = abs(a - b)
            share = ONE / (distance if distance > NEAREST else NEAREST) * t
            share = share if share < ONE else ONE
            block[i - begin] = rounded(share * b + (ONE - share) * a, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _ram(base: Any, xs: Any, epsilon: Any, out: Any, start: int, stop: int) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            b = value(base[i])
            count = ZERO
            for s in range(len(xs)):
                count += ONE if abs(value(xs[s][i]) - b) > epsilon else ZERO
            share = ONE / (count if count > ONE else ONE)
            total = ZERO
            for s in range(len(xs)):
                tau = value(xs[s][i]) - b
                total += (tau if abs(tau) > epsilon else ZERO) * share
            block[i - begin] = rounded(total + b, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _ties(base: Any, xs: Any, lows: Any, highs: Any, lambda_: Any, out: Any, found: Any, start: int, stop: int) -> int:
    """Undecided elements of a task vector are trimmed, and their positions written to `found`. Returns how many."""
    num_found, block = 0, np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        undecided = NONE
        for i in range(begin, end):
            b = value(base[i])
            total = ZERO
            for s in range(len(xs)):
                tau = value(xs[s][i]) - b
                undecided = U32(undecided + (SOME if (abs(tau) > lows[s]) & (abs(tau) < highs[s]) else NONE))
                total += tau if abs(tau) >= highs[s] else ZERO
            elected = _sign(total)
            merged, count = ZERO, ZERO
            for s in range(len(xs)):
                tau = value(xs[s][i]) - b
                agreeing = tau * elected if abs(tau) >= highs[s] else ZERO
                merged += agreeing if agreeing > ZERO else ZERO
                count += ONE if agreeing > ZERO else ZERO
            block[i - begin] = rounded(merged * elected / (count if count > ONE else ONE) * lambda_ + b, block[0])
        copied_past_caches(block, out, begin, end)
        if undecided > NONE:
            for i in range(begin, end):
                b = value(base[i])
                is_undecided = False
                for s in range(len(xs)):
                    magnitude = abs(value(xs[s][i]) - b)
                    is_undecided |= (magnitude > lows[s]) & (magnitude < highs[s])
                if is_undecided:
                    found[num_found] = i
                    num_found += 1
    stores_done()
    return num_found


@compiled
def _thresholds(base: Any, xs: Any, lows: Any, highs: Any, num_smaller: Any, positions: Any) -> Any:
    """The smallest magnitude kept of each source: float32. What is undecided of any is at `positions`."""
    exact = np.empty(len(xs), np.float32)
    between = np.empty(len(positions), np.float32)
    for s in range(len(xs)):
        count = 0
        for i in positions:
            magnitude = abs(value(xs[s][i]) - value(base[i]))
            if lows[s] < magnitude < highs[s]:
                between[count] = magnitude
                count += 1
        smaller = num_smaller[s]
        exact[s] = np.sort(between[:count])[smaller] if smaller < count else highs[s]
    return exact


@compiled
def _ties_at(base: Any, xs: Any, exact: Any, lambda_: Any, out: Any, found: Any, positions: Any) -> None:
    for i in positions:
        _ties(base, xs, exact, exact, lambda_, out, found, i, i + 1)


@compiled
def _weighted_words(words: Any, weight: Any, start: int, stop: int) -> Any:
    total = U64(0)
    for i in range(U64(start), U64(stop)):
        total += words[i] * ((i * weight) | U64(1))
    return total


@compiled
def _dare_linear(
    base: Any, xs: Any, k0s: Any, k1s: Any, bounds: Any, factors: Any, out: Any, start: int, stop: int
) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            b = value(base[i])
            total = b
            for s in range(len(xs)):
                tau = value(xs[s][i]) - b
                total += (tau if _is_kept(i, k0s[s], k1s[s], bounds[s]) else ZERO) * factors[s]
            block[i - begin] = rounded(total, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _dare_ties(
    base: Any, xs: Any, k0s: Any, k1s: Any, bounds: Any, rescales: Any, lambda_: Any, out: Any, start: int, stop: int
) -> None:
    block = np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        for i in range(begin, end):
            b = value(base[i])
            total = ZERO
            for s in range(len(xs)):
                tau = value(xs[s][i]) - b
                total += tau * rescales[s] if _is_kept(i, k0s[s], k1s[s], bounds[s]) else ZERO
            elected = _sign(total)
            merged, count = ZERO, ZERO
            for s in range(len(xs)):
                tau = (value(xs[s][i]) - b) * rescales[s]
                agreeing = tau * elected if _is_kept(i, k0s[s], k1s[s], bounds[s]) else ZERO
                merged += agreeing if agreeing > ZERO else ZERO
                count += ONE if agreeing > ZERO else ZERO
            block[i - begin] = rounded(merged * elected / (count if count > ONE else ONE) * lambda_ + b, block[0])
        copied_past_caches(block, out, begin, end)
    stores_done()


@numba.njit(inline="always")
def _sign(number: Any) -> Any:
    return ONE if number > ZERO else (-ONE if number < ZERO else ZERO)


@compiled
def _is_kept(i: Any, k0: Any, k1: Any, bound: Any) -> Any:
    """`workers.masks` for i below 2^32; `bound` is the threshold less one."""
    x = U32(U32(U32(i) * WEYL) + k0)
    x = U32(U32(x ^ U32(x >> U32(16))) * FIRST)
    x = U32(U32(U32(x ^ U32(x >> U32(15))) + k1) * SECOND)
    return U32(x ^ U32(x >> U32(16))) <= bound


def _arrays(tensors: Tensors) -> tuple[np.ndarray, ...]:
    """In one dtype, since the loop over them is compiled for one: float32 where they differ."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.float() for tensor in tensors]
    return tuple(map(as_array, tensors))


def _floats(numbers: Iterable[float]) -> tuple[np.float32, ...]:
    with np.errstate(over="ignore"):  # too large for float32 is infinite, as in torch
        return tuple(map(np.float32, numbers))


def _masks(keys: Sequence[int], densities: Sequence[float]) -> tuple[tuple[np.uint32, ...], ...]:
    """The two words of the keys, and the bounds of the hashes."""
    first, second = zip(*map(key_words, keys), strict=True)
    bounds = [threshold(density) - 1 for density in densities]
    return tuple(map(U32, first)), tuple(map(U32, second)), tuple(map(U32, bounds))


def _pieces(num_elements: int) -> list[tuple[int, int]]:
    """(start, stop) for each thread; whole blocks, so that all start where `out` may be written past the caches."""
    is_alone = getattr(_local, "is_alone", False)
    num_pieces = 1 if is_alone else max(1, min(torch.get_num_threads(), num_elements // MIN_PIECE))
    size = max(1, -(-num_elements // (num_pieces * BLOCK))) * BLOCK
    return [(start, min(start + size, num_elements)) for start in range(0, num_elements, size)]


def _run(kernel: Callable[..., Any], calls: Sequence[tuple[Any, ...]]) -> list[Any]:
    """The results of all calls; this thread makes the first."""
    others = [_threads().submit(kernel, *arguments) for arguments in calls[1:]]
    return [kernel(*arguments) for arguments in calls[:1]] + [other.result() for other in others]


def each_in_one_thread(function: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `function` once for each of `items`, in as many threads as torch uses; kernels it calls stay in its thread.

    For many small tensors: waking a thread for half of one takes as long as merging it.
    """
    queue = iter(items)  # of a sequence: asked by one thread at a time, under the interpreter's lock

    def work() -> None:
        _local.is_alone = True
        try:
            for item in queue:
                function(item)
        finally:
            _local.is_alone = False

    others = [_threads().submit(work) for _ in range(torch.get_num_threads() - 1)]
    try:
        work()
    finally:
        wait(others)
    for other in others:
        other.result()


@lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max(1, os.cpu_count() or 1), thread_name_prefix="merge")
