"""Numbers computed from the elements of tensors, sorted in pieces, so that sorting takes a bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba.extending import overload

from workers.merging.kernels.arguments import as_array, as_arrays
from workers.merging.kernels.compilation import compiled
from workers.merging.kernels.elements import bits_of, value, variance_of
from workers.merging.kernels.threads import pieces, run

__all__ = ["ascending_importances", "ascending_magnitudes", "ascending_variances", "ranks_in_rows"]

# A tensor is sorted in about PARTS parts, with one pass over the tensor for each: in more if a part were larger than
# PART elements, in one if a part were smaller than SMALL.
PARTS, PART, SMALL = 2, 1 << 24, 1 << 20
# Parts are cut into ranges of about this many elements, which are sorted within the second-level cache.
RANGE = 1 << 16
# Numbers that are not negative have the order of their bits. The bits above LOWER are the bucket; a range is buckets.
LOWER = 16
DIGIT = 11  # bits: three digits are the 31 bits of such a number, and 2048 counters stay in the first cache

U32, U64 = np.uint32, np.uint64
SIGN = U32(1 << 31)


def ascending_magnitudes(source: torch.Tensor, base: torch.Tensor) -> Iterator[np.ndarray]:
    """|source - base|, in float32, of two tensors on CPU: ascending within and across pieces, equal ones in one piece.

    A piece is valid until the next is taken.
    """
    return _ascending(_Magnitude(as_array(source), as_array(base)))


def ascending_variances(sources: Sequence[torch.Tensor], base: torch.Tensor) -> Iterator[np.ndarray]:
    """The variance of each element between the task vectors, in pieces as of `ascending_magnitudes`."""
    return _ascending(_Variance(as_array(base), as_arrays(sources)))


def ascending_importances(first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor) -> Iterator[np.ndarray]:
    """|second - first| times their row's number, of any sign, in pieces as of `ascending_magnitudes`."""
    for keys in _ascending(_Importance(as_array(first), as_array(second), as_array(rows))):
        bits = keys.view(np.uint32)
        yield np.where(bits & SIGN, bits & ~SIGN, ~bits).view(np.float32)


def ranks_in_rows(source: torch.Tensor, base: torch.Tensor, ranks: torch.Tensor, width: int) -> None:
    """Write to `ranks` the rank of each element among the magnitudes of its row of source - base, from 0, the smallest,
    in rows of `width`; of equal magnitudes the earlier is the smaller."""
    x, b, places = as_array(source.contiguous()), as_array(base.contiguous()), ranks.view(-1).numpy()
    run(_ranks_in_rows, [(x, b, places, width, *part) for part in pieces(x.size, width)])


# Kinds of numbers to sort; `like` has as many elements as there are numbers.


class _Magnitude(NamedTuple):
    like: Any
    base: Any


class _Variance(NamedTuple):
    like: Any
    xs: Any


class _Importance(NamedTuple):
    like: Any
    second: Any
    rows: Any


def _ascending(numbers: Any) -> Iterator[np.ndarray]:
    counts = _bucket_counts(numbers)
    parts = _groups(counts, min(PART, max(SMALL, numbers.like.size // PARTS)))
    # One buffer for all parts: a piece that was handed out still refers to it while the next part is made.
    buffer = np.empty(max(counts[first:stop].sum() for first, stop in parts), np.uint32)
    for first, stop in parts:
        ranges = _groups(counts[first:stop], RANGE)
        range_of = np.repeat(np.arange(len(ranges)), [end - begin for begin, end in ranges])
        ends = np.cumsum([counts[first + begin : first + end].sum() for begin, end in ranges])
        bits = _partition(numbers, first, range_of, np.append(0, ends), buffer)
        other = np.empty(max(np.diff(ends, prepend=0)), np.uint32)
        for start, end in zip([0, *ends], ends, strict=False):
            yield _radix_sorted(bits[start:end], other[: end - start]).view(np.float32)


def _groups(counts: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Adjacent buckets that hold about `size` elements together, at least one: (first, stop) of each group."""
    groups = (np.cumsum(counts) - 1) // size
    occupied = np.flatnonzero(counts)
    starts = occupied[np.flatnonzero(np.diff(groups[occupied], prepend=-1))].tolist()
    return list(zip(starts, [*starts[1:], len(counts)], strict=True))


def _bits(numbers: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(_bits)
def _bits_of(numbers: Any, i: Any) -> Any:
    kinds = {_Magnitude: _magnitude_bits, _Variance: _variance_bits, _Importance: _importance_bits}
    return kinds[numbers.instance_class]


def _magnitude_bits(numbers: Any, i: Any) -> Any:
    return bits_of(abs(value(numbers.like[i]) - value(numbers.base[i])))


def _variance_bits(numbers: Any, i: Any) -> Any:
    return bits_of(variance_of(numbers.like, numbers.xs, i))


def _importance_bits(numbers: Any, i: Any) -> Any:
    width = U64(numbers.like.size // numbers.rows.size)
    bits = bits_of(abs(value(numbers.second[i]) - value(numbers.like[i])) * numbers.rows[i // width])
    return U32(~bits) if bits & SIGN else U32(bits | SIGN)


@compiled
def _bucket_counts(numbers: Any) -> Any:
    counts = np.zeros(1 << (32 - LOWER), np.int64)
    for i in range(U64(0), U64(numbers.like.size)):
        counts[_bits(numbers, i) >> U32(LOWER)] += 1
    return counts


@compiled
def _partition(numbers: Any, first: int, range_of: Any, starts: Any, bits: Any) -> Any:
    """`bits`, with the bits of the numbers in those buckets from `first` on that have a range, range by range."""
    places = starts.astype(np.uint64)
    for i in range(U64(0), U64(numbers.like.size)):
        word = _bits(numbers, i)
        bucket = np.int64(word >> U32(LOWER)) - first
        if 0 <= bucket < range_of.size:
            place = places[range_of[bucket]]
            bits[place] = word
            places[range_of[bucket]] = place + U64(1)
    return bits


@compiled
def _ranks_in_rows(x: Any, b: Any, ranks: Any, width: int, start: int, stop: int) -> None:
    """Sort the positions in each row by magnitude: a stable sort in three passes, by one digit each."""
    mask, size = U32((1 << DIGIT) - 1), U64(width)
    keys, order, other = np.empty(width, np.uint32), np.empty(width, np.uint32), np.empty(width, np.uint32)
    counts = np.empty((3, 1 << DIGIT), np.int64)
    for row in range(U64(start), U64(stop), size):
        counts[:] = 0
        for i in range(U64(0), size):
            key = bits_of(abs(value(x[row + i]) - value(b[row + i])))
            keys[i] = key
            order[i] = U32(i)
            for digit in range(3):
                counts[digit, (key >> U32(DIGIT * digit)) & mask] += 1
        for digit in range(3):
            place = 0
            for j in range(1 << DIGIT):
                count = counts[digit, j]
                counts[digit, j] = place
                place += count
            for i in range(U64(0), size):
                at = (keys[order[i]] >> U32(DIGIT * digit)) & mask
                if digit == 2:
                    ranks[row + U64(order[i])] = counts[digit, at]
                else:
                    other[U64(counts[digit, at])] = order[i]
                counts[digit, at] += 1
            order, other = other, order


@compiled
def _radix_sorted(keys: Any, other: Any) -> Any:
    """`keys` in ascending order, in the memory of one of the two."""
    size = U64(keys.size)
    mask = U32((1 << DIGIT) - 1)
    counts = np.zeros((3, 1 << DIGIT), np.int64)
    for i in range(U64(0), size):
        key = keys[i]
        for digit in range(3):
            counts[digit, (key >> U32(DIGIT * digit)) & mask] += 1
    for digit in range(3):
        places = np.zeros(1 << DIGIT, np.uint64)
        for j in range(1, 1 << DIGIT):
            places[j] = places[j - 1] + U64(counts[digit, j - 1])
        for i in range(U64(0), size):
            key = keys[i]
            place = (key >> U32(DIGIT * digit)) & mask
            other[places[place]] = key
            places[place] += U64(1)
        keys, other = other, keys
    return keys
