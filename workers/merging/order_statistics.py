"""Order statistics of a task vector's magnitudes, found with a small table that leaves only a few candidates.

Elements are ordered by magnitude. Equal magnitudes are ordered by a tie-breaking number, the mark: the hash of the
element's index (module `workers.merging.masks`, with the key 0) times an odd factor that differs between sources,
modulo 2^32. Below index 2^32 no two marks are equal, so there are no ties: a method that is to keep n elements keeps
exactly n, and none is preferred for its position. In bfloat16 equal magnitudes are common: a tenth of all elements may
have the magnitude at a threshold.

A table is computed once from the sources. Merges with a table do not sort: they find the exact threshold of a rank
among the few elements that the table leaves undecided. A single merge needs only one or two ranks, and finds their
elements by selection without a table (class `Selection`). Selection takes less time than sorting. The module
`workers.merging.statistics` makes tables and selections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import torch

from workers.merging.masks import hashes

__all__ = [
    "ALL",
    "DIGIT_BITS",
    "LARGEST_MARK",
    "MOST_LEFT",
    "NOTHING",
    "SPACING",
    "MagnitudeTable",
    "Ranked",
    "Selected",
    "Selection",
    "Threshold",
    "TieOrder",
    "Trim",
    "Words",
    "magnitude_keys",
    "selected",
    "threshold_of_rank",
]

# The table holds one element in SPACING, 8 bytes for 128 elements. It leaves a rank undecided among at most 127
# elements.
SPACING = 128
# Marks of equal elements are computed for this many at a time: a mark takes ten times the memory of an element.
TIES_AT_ONCE = 1 << 20
# The most elements with magnitudes from one entry of a table to the next, if the entries before and after these two
# have other magnitudes.
MOST_LEFT = 3 * SPACING
LARGEST_MARK = 2**32 - 1
# Selection narrows words by this many bits at a time, until at most FEW elements share a prefix; these are collected.
DIGIT_BITS = 16
FEW = 1 << 20


@dataclass(frozen=True, order=True)
class Threshold:
    """A magnitude threshold that can also divide elements of equal magnitude.

    The threshold consists of the magnitude and the tie-breaking hash ("mark") of one element. An element reaches it if
    its magnitude is larger, or if its magnitude is equal and its mark is not smaller.
    """

    magnitude: float
    mark: int

    @property
    def key(self) -> int:
        """The threshold as one integer, for comparison with the integers of elements (function `magnitude_keys`).

        An element reaches the threshold if its integer is at least the threshold's integer.
        """
        return int(np.float32(self.magnitude).view(np.uint32)) << 32 | self.mark

    def reached_by(self, magnitudes: torch.Tensor, order: TieOrder) -> torch.Tensor:
        """Mask (bool) of the elements that are at the threshold or above it, in the shape of `magnitudes`.

        `magnitudes` are the magnitudes of all elements of a tensor. `order` decides, by tie-breaking marks, about
        elements whose magnitude equals the threshold's magnitude.
        """
        equal = (magnitudes == self.magnitude).flatten()
        reached = (magnitudes > self.magnitude).flatten()
        for start in range(0, equal.numel(), TIES_AT_ONCE):
            at = equal[start : start + TIES_AT_ONCE].nonzero().flatten().add_(start)
            reached[at] = order.marks_at(at) >= self.mark
        return reached.view(magnitudes.shape)


@dataclass(frozen=True)
class TieOrder:
    """Rule that breaks ties between elements of equal magnitude in a tensor.

    Elements of equal magnitude are ordered by hashes ("marks") of their indices. `key` selects the hash, so that
    tensors with different keys have different orders. With `keeps_equal`, elements of equal magnitude are not ordered
    but have the same rank, as in recipes of format 1.
    """

    key: int
    keeps_equal: bool = False

    @property
    def factor(self) -> int:
        """Odd factor that turns the hash of an element's index into the element's tie-breaking mark.

        The factor is the hash of index 0 with the key `key`, with its last bit set to 1.
        """
        return int(hashes(self.key, torch.zeros(1, dtype=torch.int64))) | 1

    def marks_at(self, positions: torch.Tensor) -> torch.Tensor:
        """The tie-breaking hashes ("marks") of the elements with the indices `positions`, as int64 in [0, 2^32)."""
        return (hashes(0, positions) * self.factor) & LARGEST_MARK

    def lowest(self, threshold: Threshold) -> Threshold:
        """The lowest threshold that keeps the same elements as `threshold`.

        If the field `keeps_equal` is True, elements of equal magnitude are all kept or all dropped. Then the result has
        the magnitude of `threshold` and the lowest tie-breaking mark, 0. Otherwise the result is `threshold` itself.
        """
        return Threshold(threshold.magnitude, 0) if self.keeps_equal else threshold

    def above(self, threshold: Threshold) -> Threshold:
        """The lowest threshold that drops the element whose magnitude and tie-breaking mark are `threshold`.

        Usually the result has the same magnitude and the next larger mark. If the field `keeps_equal` is True, elements
        of equal magnitude are all kept or all dropped. The result then has the next larger magnitude.
        """
        if self.keeps_equal or threshold.mark == LARGEST_MARK:
            return Threshold(float(np.nextafter(np.float32(threshold.magnitude), np.float32(np.inf))), 0)
        return Threshold(threshold.magnitude, threshold.mark + 1)


@dataclass(frozen=True)
class Trim:
    """Lower and upper bound (`low`, `high`) of the threshold that keeps a given number of elements.

    Elements are ordered by the pair (magnitude, mark); the mark is a number that breaks ties. To keep n elements, the
    threshold is the pair of the n-th largest element. If `low` equals `high`, this pair is the threshold. Otherwise
    fewer than SPACING elements (a constant) lie strictly between the bounds. The n-th largest is the one of these
    elements that is larger than exactly `num_smaller` of them; its pair is the threshold. `is_tied` says whether the
    range of magnitudes from `low` to `high` may contain more than MOST_LEFT elements (a constant).
    """

    low: Threshold
    high: Threshold
    num_smaller: int = 0
    is_tied: bool = False

    @property
    def magnitudes(self) -> tuple[float, float]:
        """Two float32 numbers: only elements with a magnitude between them need their tie-breaking marks compared.

        An element whose magnitude is at most the first number is below the threshold. An element whose magnitude is at
        least the second number reaches the threshold. All other elements must be compared by magnitude and mark. If no
        element reaches the threshold, the second number is NaN, with which every comparison is false.
        """
        if self == NOTHING:
            return float("inf"), float("nan")
        if self == ALL:
            return 0.0, 0.0
        below = np.nextafter(np.float32(self.low.magnitude), np.float32(-1))
        return float(below), float(np.nextafter(np.float32(self.high.magnitude), np.float32(np.inf)))

    @classmethod
    def at(cls, threshold: Threshold, *, is_tied: bool = False) -> Self:
        return cls(threshold, threshold, is_tied=is_tied)


# No magnitude is below 0, and none is above infinity: the first keeps all elements, the second none.
ALL = Trim.at(Threshold(0.0, 0))
NOTHING = Trim.at(Threshold(float("inf"), LARGEST_MARK))


class Ranked(Protocol):
    """Interface of an object that finds the n-th largest magnitude of a tensor, from a table or by selection.

    `num_elements` is the number of elements that are ranked: the elements of the tensor, or of all tensors of its
    model.
    """

    @property
    def num_elements(self) -> int: ...

    @property
    def num_not_zero(self) -> int: ...

    def trim(self, rank: int) -> Trim:
        """A lower and an upper bound of the threshold that keeps the `rank` largest magnitudes.

        A threshold is a magnitude with a tie-breaking mark. If it is known exactly, the bounds are equal. `rank` is at
        least 1.
        """
        ...

    def threshold(self, rank: int, sizes: torch.Tensor, order: TieOrder) -> Threshold:
        """The exact threshold that keeps the `rank` largest magnitudes: the `rank`-th largest, and its mark.

        `rank` is at least 1. The mark is a hash that breaks ties between equal magnitudes. `sizes` are the magnitudes
        of all elements (float32), among which the threshold is searched for. `order` is the rule that computes the
        marks.
        """
        ...


@dataclass(frozen=True)
class Selection:
    """The magnitudes of a tensor's elements, with a selection algorithm that finds the element of a given rank.

    `select(n)` returns the element that n other elements precede in ascending order of magnitude, so `select(0)`
    returns the smallest element. `num_zeros()` counts the elements that are zero, and `num_elements` is the number of
    all elements.
    """

    num_elements: int
    select: Callable[[int], Selected]
    num_zeros: Callable[[], int]

    @property
    def num_not_zero(self) -> int:
        return self.num_elements - self.num_zeros()

    def trim(self, rank: int) -> Trim:
        """The threshold that keeps the `rank` largest magnitudes, as two equal bounds.

        The threshold is known exactly, so it is both the lower and the upper bound. A threshold is a magnitude with a
        tie-breaking mark. `rank` is at least 1.
        """
        found = self.select(self.num_elements - rank)
        return Trim.at(found.threshold, is_tied=found.num_equal > MOST_LEFT)

    def threshold(self, rank: int, sizes: torch.Tensor, order: TieOrder) -> Threshold:
        """The exact threshold that keeps the `rank` largest magnitudes: the `rank`-th largest, and its mark.

        The mark is a hash that breaks ties between equal magnitudes. The parameters `sizes` and `order` are not used;
        they belong to the interface `Ranked`.
        """
        return self.trim(rank).high


class MagnitudeTable:
    """Table of a tensor's magnitudes that limits the search for the n-th largest to a few elements.

    `magnitudes` and `marks` have the magnitude and the tie-breaking mark of every 128th element in ascending order, and
    of the largest element. The tensor has `num_elements` elements, of which `num_zeros` are zero.
    """

    def __init__(
        self,
        magnitudes: np.ndarray,
        marks: np.ndarray,
        *,
        num_elements: int,
        num_zeros: int,
    ) -> None:
        self._magnitudes = magnitudes
        self._marks = marks
        self.num_elements = num_elements
        self.num_not_zero = num_elements - num_zeros

    @classmethod
    def of_ascending(cls, ascending: Iterable[tuple[np.ndarray, np.ndarray]]) -> Self:
        """Make the table from all magnitudes of a tensor in ascending order.

        The magnitudes are given in pieces: pairs of arrays (magnitudes in float32, tie-breaking marks in uint32). Equal
        magnitudes are in the same piece. There is at least one piece, and no piece is empty. A piece is not used after
        the next piece is taken.
        """
        columns: list[tuple[np.ndarray, np.ndarray]] = []
        total = num_zeros = 0
        for sizes, marks in ascending:
            rows = np.arange(-total % SPACING, sizes.size, SPACING)
            columns.append((sizes[rows], marks[rows]))
            last = sizes[-1:].copy(), marks[-1:].copy()
            num_zeros += int(np.searchsorted(sizes, 0, side="right"))
            total += sizes.size
        magnitudes, of_marks = (np.concatenate(column) for column in zip(*columns, last, strict=True))
        return cls(magnitudes, of_marks, num_elements=total, num_zeros=num_zeros)

    @property
    def num_bytes(self) -> int:
        return self._magnitudes.nbytes + self._marks.nbytes

    def trim(self, rank: int) -> Trim:
        """A lower and an upper bound of the threshold that keeps the `rank` largest magnitudes.

        `rank` is at least 1. The threshold is the magnitude and the tie-breaking mark of the `rank`-th largest element.
        If the table has an entry for this element, both bounds are the threshold. Otherwise they are the table's
        entries before and after the element.
        """
        cut, after = divmod(self.num_elements - rank, SPACING)
        low = self._threshold(cut)
        if after == 0:
            return Trim.at(low, is_tied=self._is_tied(cut, cut))
        high = self._threshold(cut + 1)
        if rank == 1:
            return Trim.at(high, is_tied=self._is_tied(cut + 1, cut + 1))
        return Trim(low, high, after - 1, is_tied=self._is_tied(cut, cut + 1))

    def threshold(self, rank: int, sizes: torch.Tensor, order: TieOrder) -> Threshold:
        """The exact threshold that keeps the `rank` largest magnitudes: the `rank`-th largest, and its mark.

        `rank` is at least 1. The mark is a hash that breaks ties between equal magnitudes. `sizes` are the magnitudes
        (float32) from which the table was made. `order` is the rule that computes the marks.
        """
        trim = self.trim(rank)
        if trim.low == trim.high:
            return trim.high
        flat = sizes.flatten()
        at = ((flat >= trim.low.magnitude) & (flat <= trim.high.magnitude)).nonzero().flatten()
        keys = (flat[at].view(torch.int32).long() << 32) | order.marks_at(at)
        return _threshold(int(keys[(keys > trim.low.key) & (keys < trim.high.key)].sort().values[trim.num_smaller]))

    def _is_tied(self, first: int, last: int) -> bool:
        """Whether many elements may have the same magnitude as the table's entry `first` or `last`.

        `first` and `last` are indices of entries. The table has an entry for every 128th element. If the entry before
        `first` has the magnitude of `first`, all elements between these two entries have this magnitude, and the result
        is True. The same holds for `last` and the entry after it.
        """
        sizes = self._magnitudes
        return bool(
            (first > 0 and sizes[first - 1] == sizes[first])
            or (last + 1 < len(sizes) and sizes[last + 1] == sizes[last])
        )

    def _threshold(self, cut: int) -> Threshold:
        return Threshold(float(self._magnitudes[cut]), int(self._marks[cut]))


class Words(Protocol):
    """Interface of a tensor's elements as 64-bit sort keys ("words"), which can be counted and read by prefix.

    The upper 32 bits of a word are the element's magnitude as a float32. The lower 32 bits are the element's mark, a
    number that orders elements of equal magnitude. A prefix is the first bits of a word, as a number: the word without
    its last `shift` bits.
    """

    def counts(self, prefix: int, shift: int) -> np.ndarray:
        """Count the words (sort keys) that begin with `prefix`, by the value of their next 16 bits; int64 [65536].

        A word consists of the prefix, these 16 bits and `shift` further bits.
        """
        ...

    def with_prefix(self, prefix: int, shift: int, most: int) -> np.ndarray:
        """The words (sort keys, uint64) that begin with `prefix`, which is followed by `shift` more bits in each word.

        The caller knows that there are at most `most` such words.
        """
        ...


@dataclass(frozen=True)
class Selected:
    """The element that the function `selected` found among the elements of several tensors.

    `threshold` has the element's magnitude and its tie-breaking mark, and `tensor` is the index of the tensor that
    contains it. `num_equal` is the number of elements of all tensors that have the same magnitude.
    """

    threshold: Threshold
    tensor: int
    num_equal: int


def selected(tensors: Sequence[Words], num_smaller: int, *, first: np.ndarray | None = None) -> Selected:
    """Find the element that is at the index `num_smaller` when the elements of all tensors are sorted together.

    Elements are sorted in ascending order by magnitude, then by tie-breaking mark, then by the index of their tensor;
    the first has the index 0. The result contains the element's magnitude, mark and tensor, and the number of elements
    of the same magnitude. The element's bits are found in several passes over all tensors. Each pass counts the
    elements by their next bits, and needs memory for one tensor at a time. `first` has the counts of the first pass,
    summed over the tensors (`Words.counts` with prefix 0 and shift 48); if it is None, this function computes them.
    """
    prefix, shift, count, num_equal = 0, 64, 0, 0
    while shift == 64 or (count > FEW and shift > 0):
        shift -= DIGIT_BITS
        known = first if shift == 64 - DIGIT_BITS else None
        counts = sum(each.counts(prefix, shift) for each in tensors) if known is None else known
        ends = np.cumsum(counts)
        digit = int(np.searchsorted(ends, num_smaller, side="right"))
        count = int(ends[digit] - (ends[digit - 1] if digit else 0))
        num_smaller -= int(ends[digit]) - count
        prefix = prefix << DIGIT_BITS | digit
        if shift == 32:
            num_equal = count
    found = [each.with_prefix(prefix, shift, count) for each in tensors]
    words = np.concatenate(found)
    word = int(np.partition(words, num_smaller)[num_smaller])
    if shift > 32:
        num_equal = int(np.count_nonzero(words >> np.uint64(32) == np.uint64(word >> 32)))
    equal = np.flatnonzero(words == np.uint64(word))
    at = equal[num_smaller - int(np.count_nonzero(words < np.uint64(word)))]
    tensor = int(np.searchsorted(np.cumsum([each.size for each in found]), at, side="right"))
    return Selected(_threshold(word), tensor, num_equal)


def threshold_of_rank(sizes: torch.Tensor, rank: int, order: TieOrder, table: Ranked | None = None) -> Threshold:
    """The threshold that keeps the `rank` largest of the magnitudes `sizes`: the `rank`-th largest, with its mark.

    `rank` is at least 1. `sizes` are in float32. `order` breaks ties between equal magnitudes by numbers called marks.
    `table` is an object that finds the threshold faster because statistics of the magnitudes are known; if it is None,
    the threshold is searched for in `sizes`.
    """
    if table is not None:
        return table.threshold(rank, sizes, order)
    flat = sizes.flatten()
    magnitude = torch.kthvalue(flat, flat.numel() - rank + 1).values
    at = (flat == magnitude).nonzero().flatten()
    num_larger = int(torch.count_nonzero(flat > magnitude))
    found = order.marks_at(at).sort(descending=True).values[rank - 1 - num_larger]
    return Threshold(float(magnitude), int(found))


# Thresholds as numbers: the bits of float32 numbers that are not negative have the order of the numbers.


def magnitude_keys(sizes: torch.Tensor, order: TieOrder) -> torch.Tensor:
    """Integer sort keys (int64) that order the elements of a tensor by magnitude, in the shape of `sizes`.

    `sizes` are the elements' magnitudes, which are compared in float32. `order` breaks ties between equal magnitudes by
    tie-breaking marks. With `order.keeps_equal`, equal magnitudes have equal integers.
    """
    keys = sizes.float().contiguous().view(torch.int32).long() << 32
    if not order.keeps_equal:
        keys |= order.marks_at(torch.arange(sizes.numel(), device=sizes.device)).view(sizes.shape)
    return keys


def _threshold(key: int) -> Threshold:
    return Threshold(float(np.uint32(key >> 32).view(np.float32)), key & LARGEST_MARK)
