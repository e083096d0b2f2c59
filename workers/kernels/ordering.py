"""The magnitudes of a task vector in ascending order, in pieces: sorting them takes a bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from workers.kernels.elements import as_array, bits_of, compiled, value

__all__ = ["ascending_magnitudes"]

# Tensors of more elements are sorted in parts of about as many, each by a pass of its own over the tensor.
PART = 1 << 24
# Parts are cut into ranges of about as many elements, whose sorting stays in the second cache.
RANGE = 1 << 16
# Magnitudes are ordered as their bits are; the upper ones, the bucket, tell ranges apart.
LOWER = 16
DIGIT = 11  # bits: three digits are the 31 bits of a magnitude, and 2048 counters stay in the first cache

U32, U64 = np.uint32, np.uint64


def ascending_magnitudes(source: torch.Tensor, base: torch.Tensor) -> Iterator[np.ndarray]:
    """|source - base|, in float32, of two tensors on CPU: ascending within and over the pieces, equal ones in one.

    A piece is good until the next is asked for.
    """
    x, b = as_array(source), as_array(base)
    counts = _bucket_counts(x, b)
    for first, stop in _groups(counts, PART):
        ranges = _groups(counts[first:stop], RANGE)
        range_of = np.repeat(np.arange(len(ranges)), [end - begin for begin, end in ranges])
        ends = np.cumsum([counts[first + begin : first + end].sum() for begin, end in ranges])
        bits = _partition(x, b, first, range_of, np.append(0, ends))
        other = np.empty(max(np.diff(ends, prepend=0)), np.uint32)
        for start, end in zip([0, *ends], ends, strict=False):
            yield _radix_sorted(bits[start:end], other[: end - start]).view(np.float32)


def _groups(counts: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Adjacent buckets that hold about `size` elements together, at least one: (first, stop) of each group."""
    groups = (np.cumsum(counts) - 1) // size
    occupied = np.flatnonzero(counts)
    starts = occupied[np.flatnonzero(np.diff(groups[occupied], prepend=-1))].tolist()
    return list(zip(starts, [*starts[1:], len(counts)], strict=True))


@compiled
def _bucket_counts(x: Any, b: Any) -> Any:
    counts = np.zeros(1 << (32 - LOWER), np.int64)
    for i in range(U64(0), U64(x.size)):
        counts[bits_of(abs(value(x[i]) - value(b[i]))) >> U32(LOWER)] += 1
    return counts


@compiled
def _partition(x: Any, b: Any, first: int, range_of: Any, starts: Any) -> Any:
    """The bits of all magnitudes in buckets from `first` on that are of a range, range by range."""
    bits = np.empty(starts[-1], np.uint32)
    places = starts.astype(np.uint64)
    for i in range(U64(0), U64(x.size)):
        word = bits_of(abs(value(x[i]) - value(b[i])))
        bucket = np.int64(word >> U32(LOWER)) - first
        if 0 <= bucket < range_of.size:
            place = places[range_of[bucket]]
            bits[place] = word
            places[range_of[bucket]] = place + U64(1)
    return bits


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
