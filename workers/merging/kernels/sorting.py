"""CPU sorting and selection of numbers that are computed from the elements of tensors, such as magnitudes.

Numbers are sorted in pieces, so that sorting takes bounded memory; a single rank is selected without sorting. Equal
numbers are ordered by the marks of their elements (module `workers.merging.order_statistics`). Sorting uses words: a
word is an integer of 64 bits, with the bits of a float32 number in its upper half and the element's mark in its lower
half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.extending import overload

from workers.merging.kernels.arguments import as_array, as_arrays
from workers.merging.kernels.compilation import IN_PLACE, compiled
from workers.merging.kernels.elements import bits_of, is_kept, marked, variance_of
from workers.merging.kernels.operations import value
from workers.merging.kernels.threads import pieces, run
from workers.merging.masks import key_words, threshold
from workers.merging.order_statistics import DIGIT_BITS, Selection, Words, selected

__all__ = [
    "ascending_importances",
    "ascending_magnitudes",
    "ascending_variances",
    "magnitude_words",
    "ranks_in_rows",
    "selected_magnitudes",
    "selected_variances",
]

# A tensor is sorted in about PARTS parts, with one pass over the tensor for each: in more if a part were larger than
# PART elements, in one if a part were smaller than SMALL.
PARTS, PART, SMALL = 4, 1 << 23, 1 << 19
# Parts are cut into ranges of about this many elements, which are sorted within the second-level cache.
RANGE = 1 << 16
# Numbers that are not negative have the order of their bits. The bits above LOWER are the bucket; a range is several
# buckets.
LOWER = DIGIT_BITS
DIGIT = 11  # bits: six digits are a word, and their counters fit the second-level cache
DIGITS = 6

U32, U64, F32 = np.uint32, np.uint64, np.float32
SIGN = U32(1 << 31)


def ascending_magnitudes(
    source: torch.Tensor, base: torch.Tensor, factor: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the magnitudes |source - base| in ascending order, in pieces, with numbers (marks) that break ties.

    A piece is a pair of arrays (magnitudes in float32, marks in uint32), valid until the next piece is taken. The
    tensors are on CPU. Equal magnitudes are in the order of their marks. The mark of an element is a hash of its index,
    multiplied modulo 2^32 by `factor`, an odd number that differs between tensors (property `TieOrder.factor`).
    """
    return map(_split, _ascending(_Magnitude(as_array(source), as_array(base), U32(factor))))


def ascending_variances(
    sources: Sequence[torch.Tensor], base: torch.Tensor, factor: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield the variance of each element across task vectors in ascending order, in pieces, with marks that break ties.

    Task vectors are the differences of `sources` from `base`, on CPU. A piece is a pair of arrays (variances in
    float32, marks in uint32), valid until the next piece is taken. Equal variances are in the order of their marks. The
    mark of an element is a hash of its index, multiplied modulo 2^32 by `factor`, an odd number that differs between
    tensors (property `TieOrder.factor`).
    """
    return map(_split, _ascending(_Variance(as_array(base), as_arrays(sources), U32(factor))))


def ascending_importances(first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor) -> Iterator[np.ndarray]:
    """Yield the importances of all elements in ascending order, in pieces; Arcee Fusion selects elements by importance.

    The importance of an element is |second - first| times the number in `rows` for its row. These numbers may have any
    sign. A piece is an array in float32, valid until the next piece is taken.
    """
    for words in _ascending(_Importance(as_array(first), as_array(second), as_array(rows))):
        bits = (words >> U64(32)).astype(np.uint32)
        yield np.where(bits & SIGN, bits & ~SIGN, ~bits).view(np.float32)


def ranks_in_rows(source: torch.Tensor, base: torch.Tensor, factor: int, ranks: torch.Tensor, width: int) -> None:
    """Write the rank of each element's magnitude |source - base| within its row to the tensor `ranks`.

    Rank 0 is the smallest magnitude. Rows have `width` elements. All tensors are on CPU. Equal magnitudes are ranked by
    the marks of their elements. A mark is a hash of the element's index, multiplied modulo 2^32 by `factor`, an odd
    number that differs between tensors (property `TieOrder.factor`).
    """
    x, b, places = as_array(source.contiguous()), as_array(base.contiguous()), ranks.view(-1).numpy()
    run(_ranks_in_rows, [(x, b, U32(factor), places, width, *part) for part in pieces(x.size, width)])


def selected_magnitudes(source: torch.Tensor, base: torch.Tensor, factor: int) -> Selection:
    """Make an object that finds the n-th largest of the magnitudes |source - base| of two CPU tensors, for any n.

    The n-th largest magnitude is the threshold of merge methods that keep the n largest elements. The object finds it
    without sorting, by passes over all elements at each call. Equal magnitudes are ordered by the marks of their
    elements. A mark is a hash of the element's index, multiplied modulo 2^32 by `factor`, an odd number that differs
    between tensors (property `TieOrder.factor`).
    """
    return _selection(_Magnitude(as_array(source), as_array(base), U32(factor)))


def selected_variances(sources: Sequence[torch.Tensor], base: torch.Tensor, factor: int) -> Selection:
    """Make an object that finds the n-th largest of the elements' variances across task vectors, for any n.

    Task vectors are the differences of `sources` from `base`, on CPU. The n-th largest variance is the threshold of the
    merge method SCE, which keeps the n elements that vary most. The object finds it without sorting, by passes over all
    elements at each call. Equal variances are ordered by the marks of their elements. A mark is a hash of the element's
    index, multiplied modulo 2^32 by `factor`, an odd number that differs between tensors (property `TieOrder.factor`).
    """
    return _selection(_Variance(as_array(base), as_arrays(sources), U32(factor)))


def magnitude_words(
    source: torch.Tensor, base: torch.Tensor, factor: int, mask: tuple[float, int] | None = None
) -> Words:
    """The magnitudes |source - base| of two CPU tensors, as 64-bit sort keys ("words") with marks that break ties.

    A word has the bits of the magnitude (float32) in its upper half and the mark of the element in its lower half. The
    mark is a hash of the element's index, multiplied modulo 2^32 by `factor`, an odd number that differs between
    tensors (property `TieOrder.factor`). `mask` is the (density, key) of a random mask; None is no mask. With a mask, a
    magnitude is divided by the density if the mask keeps the element, and is zero otherwise.
    """
    numbers = as_array(source), as_array(base), U32(factor)
    if mask is None:
        return TensorWords(_Magnitude(*numbers))
    density, key = mask
    k0, k1 = map(U32, key_words(key))
    return TensorWords(_Masked(*numbers, k0, k1, U32(threshold(density) - 1), F32(1 / density)))


def _selection(numbers: Any) -> Selection:
    return Selection(
        numbers.like.size,
        select=lambda num_smaller: selected([TensorWords(numbers)], num_smaller),
        num_zeros=lambda: sum(run(_zeros, [(numbers, *part) for part in pieces(numbers.like.size, 1)])),
    )


class TensorWords:
    """The elements of a CPU tensor as 64-bit sort keys ("words"), for selecting the n-th largest.

    The upper half of a key is the number by which elements are ranked, such as the magnitude of an element's difference
    from the base. The lower half orders elements with equal numbers. The argument `numbers` is an object that holds the
    tensor and computes the upper halves; its class decides by which number elements are ranked. The class implements
    the interface `order_statistics.Words`.
    """

    def __init__(self, numbers: Any) -> None:
        self._numbers = numbers
        self._parts = pieces(numbers.like.size, 1)

    def counts(self, prefix: int, shift: int) -> np.ndarray:
        calls = [(self._numbers, U64(prefix), U64(shift), *part) for part in self._parts]
        counts: np.ndarray = sum(run(_digit_counts, calls), np.zeros(1 << LOWER, np.int64))
        return counts

    def with_prefix(self, prefix: int, shift: int, most: int) -> np.ndarray:
        found = [np.empty(most, np.uint64) for _ in self._parts]
        calls = [
            (self._numbers, U64(prefix), U64(shift), words, *part)
            for words, part in zip(found, self._parts, strict=True)
        ]
        return np.concatenate([words[:size] for words, size in zip(found, run(_collect, calls), strict=True)])


def _split(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split sorted 64-bit words into the numbers in their upper halves and the marks in their lower halves.

    A word is the sort key of an element. Its mark is a hash that orders elements whose numbers are equal. Returns the
    arrays (numbers in float32, marks in uint32).
    """
    return (words >> U64(32)).astype(np.uint32).view(np.float32), words.astype(np.uint32)


# Kinds of numbers to sort; `like` has as many elements as there are numbers.


class _Magnitude(NamedTuple):
    like: Any
    base: Any
    factor: Any


class _Masked(NamedTuple):
    like: Any
    base: Any
    factor: Any
    k0: Any
    k1: Any
    bound: Any
    scale: Any


class _Variance(NamedTuple):
    like: Any
    xs: Any
    factor: Any


class _Importance(NamedTuple):
    like: Any
    second: Any
    rows: Any


def _ascending(numbers: Any) -> Iterator[np.ndarray]:
    counts = _bucket_counts(numbers)
    parts = _groups(counts, min(PART, max(SMALL, numbers.like.size // PARTS)))
    # One buffer for all parts: a piece that was yielded still refers to it while the next part is made.
    buffer = np.empty(max(counts[first:stop].sum() for first, stop in parts), np.uint64)
    for first, stop in parts:
        ranges = _groups(counts[first:stop], RANGE)
        range_of = np.repeat(np.arange(len(ranges)), [end - begin for begin, end in ranges])
        ends = np.cumsum([counts[first + begin : first + end].sum() for begin, end in ranges])
        words = _partition(numbers, first, range_of, np.append(0, ends), buffer)
        other = np.empty(max(np.diff(ends, prepend=0)), np.uint64)
        for start, end in zip([0, *ends], ends, strict=False):
            yield _radix_sorted(words[start:end], other[: end - start])


def _groups(counts: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Divide adjacent buckets of a radix sort into groups of about `size` elements, each of at least one bucket.

    A bucket has the elements whose numbers begin with the same bits. The groups are sorted one after another, so that
    memory is needed for one group only. `counts` has the number of elements in each bucket. Returns (first bucket,
    bucket after the last) for each group. Empty buckets at the beginning are in no group.
    """
    groups = (np.cumsum(counts) - 1) // size
    occupied = np.flatnonzero(counts)
    starts = occupied[np.flatnonzero(np.diff(groups[occupied], prepend=-1))].tolist()
    return list(zip(starts, [*starts[1:], len(counts)], strict=True))


def _bits(numbers: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(_bits)
def _bits_of(numbers: Any, i: Any) -> Any:
    kinds = {
        _Magnitude: _magnitude_bits,
        _Masked: _masked_bits,
        _Variance: _variance_bits,
        _Importance: _importance_bits,
    }
    return kinds[numbers.instance_class]


def _magnitude_bits(numbers: Any, i: Any) -> Any:
    return bits_of(abs(value(numbers.like[i]) - value(numbers.base[i])))


def _masked_bits(numbers: Any, i: Any) -> Any:
    if not is_kept(i, numbers.k0, numbers.k1, numbers.bound):
        return U32(0)
    return bits_of(abs(value(numbers.like[i]) - value(numbers.base[i])) * numbers.scale)


def _variance_bits(numbers: Any, i: Any) -> Any:
    return bits_of(variance_of(numbers.like, numbers.xs, i))


def _importance_bits(numbers: Any, i: Any) -> Any:
    width = U64(numbers.like.size // numbers.rows.size)
    bits = bits_of(abs(value(numbers.second[i]) - value(numbers.like[i])) * numbers.rows[i // width])
    return U32(~bits) if bits & SIGN else U32(bits | SIGN)


def _mark(numbers: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(_mark)
def _mark_of(numbers: Any, i: Any) -> Any:
    return _no_mark if numbers.instance_class is _Importance else _mark_by_factor


def _mark_by_factor(numbers: Any, i: Any) -> Any:
    return marked(i, numbers.factor)


def _no_mark(numbers: Any, i: Any) -> Any:
    return U32(0)


@compiled
def _bucket_counts(numbers: Any) -> Any:
    counts = np.zeros(1 << (32 - LOWER), np.int64)
    for i in range(U64(0), U64(numbers.like.size)):
        counts[_bits(numbers, i) >> U32(LOWER)] += 1
    return counts


@compiled
def _digit_counts(numbers: Any, prefix: Any, shift: Any, start: int, stop: int) -> Any:
    """Count the elements whose sort keys begin with the bits `prefix`, by the digit that follows the prefix.

    `numbers` computes the number by which each element is sorted, such as its magnitude. A sort key ("word") has 64
    bits: this number, then the element's tie-breaking mark. A counted key consists of the prefix, a digit of LOWER bits
    (a constant), and `shift` further bits. Only the elements from `start` to `stop` - 1 are counted. Returns a count
    for each value of the digit.
    """
    counts, mask = np.zeros(1 << LOWER, np.int64), U64((1 << LOWER) - 1)
    above = shift + U64(LOWER)
    for i in range(U64(start), U64(stop)):
        if above == U64(64):
            counts[_bits(numbers, i) >> U32(32 - LOWER)] += 1
        elif _has_prefix(numbers, i, prefix, above):
            counts[(_word(numbers, i) >> shift) & mask] += 1
    return counts


@compiled
def _collect(numbers: Any, prefix: Any, shift: Any, words: Any, start: int, stop: int) -> Any:
    """Write the 64-bit words that begin with the bits `prefix` to the array `words`, and return their number.

    `numbers` computes the number by which each element is sorted, such as its magnitude. A word is the sort key of an
    element: this number, then the element's tie-breaking mark. `shift` is the number of bits after the prefix. Only the
    elements from `start` to `stop` - 1 are considered.
    """
    count = U64(0)
    for i in range(U64(start), U64(stop)):
        if _has_prefix(numbers, i, prefix, shift):
            words[count] = _word(numbers, i)
            count += U64(1)
    return count


@numba.njit(**IN_PLACE)
def _word(numbers: Any, i: Any) -> Any:
    return U64(_bits(numbers, i)) << U64(32) | U64(_mark(numbers, i))


@numba.njit(**IN_PLACE)
def _has_prefix(numbers: Any, i: Any, prefix: Any, shift: Any) -> Any:
    """Whether the sort key of element i, a 64-bit word, begins with the bits `prefix`.

    The upper half of a word is the number that is computed from element i of `numbers`. The lower half is a mark, which
    orders elements with equal numbers. `shift`, at most 48, is the number of bits after the prefix. The mark is
    computed only if the prefix is longer than 32 bits and the number agrees with it.
    """
    if shift >= U64(32):
        return U64(_bits(numbers, i)) >> (shift - U64(32)) == prefix
    if U64(_bits(numbers, i)) != prefix >> (U64(32) - shift):
        return False
    return _word(numbers, i) >> shift == prefix


@compiled
def _zeros(numbers: Any, start: int, stop: int) -> int:
    count = 0
    for i in range(U64(start), U64(stop)):
        count += _bits(numbers, i) == U32(0)
    return count


@compiled
def _partition(numbers: Any, first: int, range_of: Any, starts: Any, words: Any) -> Any:
    """Write the sort keys of the elements in some adjacent buckets of a radix sort to `words`, and return `words`.

    A bucket has the elements whose numbers begin with the same bits. A sort key ("word") has 64 bits: an element's
    number, then its tie-breaking mark. Several buckets together form a range. The words of a range are adjacent in
    `words`, and are not sorted.

    - `first`: the first bucket
    - `range_of`: for each bucket from `first` on, the range that it belongs to
    - `starts`: for each range, the index in `words` where it begins
    """
    places = starts.astype(np.uint64)
    for i in range(U64(0), U64(numbers.like.size)):
        bits = _bits(numbers, i)
        bucket = np.int64(bits >> U32(LOWER)) - first
        if 0 <= bucket < range_of.size:
            place = places[range_of[bucket]]
            words[place] = U64(bits) << U64(32) | U64(_mark(numbers, i))
            places[range_of[bucket]] = place + U64(1)
    return words


@compiled
def _ranks_in_rows(x: Any, b: Any, factor: Any, ranks: Any, width: int, start: int, stop: int) -> None:
    """Compute the ranks of magnitudes |x - b| within rows, for the elements from `start` to `stop` - 1.

    `x` and `b` are the flat arrays of a tensor and of the base. Rows have `width` elements; `start` and `stop` are
    multiples of `width`. Ranks are written to `ranks`. The positions in each row are sorted by magnitude, in three
    stable passes by one digit each. Positions of equal magnitude are sorted by their marks, hashes of the elements'
    indices times `factor`.
    """
    mask, size = U32((1 << DIGIT) - 1), U64(width)
    keys, order, other = np.empty(width, np.uint32), np.empty(width, np.uint32), np.empty(width, np.uint32)
    counts, marks = np.empty((3, 1 << DIGIT), np.int64), np.empty(width, np.uint64)
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
                digit_of = (keys[order[i]] >> U32(DIGIT * digit)) & mask
                other[U64(counts[digit, digit_of])] = order[i]
                counts[digit, digit_of] += 1
            order, other = other, order
        first = 0  # position of a run of equal magnitudes
        for i in range(1, width + 1):
            if i == width or keys[order[i]] != keys[order[first]]:
                if i - first > 1:
                    equal = marks[first:i]
                    for j in range(first, i):
                        marks[j] = U64(marked(row + U64(order[j]), factor)) << U64(32) | U64(order[j])
                    equal.sort()
                    for j in range(first, i):
                        order[j] = U32(marks[j] & U64(0xFFFFFFFF))
                first = i
        for at in range(U64(0), size):
            ranks[row + U64(order[at])] = at


@compiled
def _radix_sorted(words: Any, other: Any) -> Any:
    """Sort the 64-bit integers in `words` in ascending order by a radix sort, and return the sorted array.

    `other` is memory of the same size. The result is in the memory of `words` or of `other`. The sort goes digit by
    digit. A digit that is the same in all integers needs no pass.
    """
    size = U64(words.size)
    mask = U64((1 << DIGIT) - 1)
    counts = np.zeros((DIGITS, 1 << DIGIT), np.uint32)
    for i in range(U64(0), size):
        word = words[i]
        for digit in range(DIGITS):
            counts[digit, (word >> U64(DIGIT * digit)) & mask] += U32(1)
    for digit in range(DIGITS):
        shift = U64(DIGIT * digit)
        if U64(counts[digit, (words[0] >> shift) & mask]) == size:
            continue
        places = np.zeros(1 << DIGIT, np.uint64)
        for j in range(1, 1 << DIGIT):
            places[j] = places[j - 1] + U64(counts[digit, j - 1])
        for i in range(U64(0), size):
            word = words[i]
            place = (word >> shift) & mask
            other[places[place]] = word
            places[place] += U64(1)
        words, other = other, words
    return words
