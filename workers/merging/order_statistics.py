"""Order statistics of a task vector's magnitudes: a small table that narrows any rank to a few elements.

Elements are ordered by magnitude, and equal magnitudes by a mark: the hash of the index (`workers.merging.masks`, with
the key 0) times an odd factor of the source's own, modulo 2^32. Below index 2^32 no two marks are equal, so there are
no ties: a rank keeps exactly its number of elements, of which no position is preferred. In bfloat16 equal magnitudes
are the rule: a tenth of all elements may have the magnitude at a threshold.

A table is computed once from the sources. No merge sorts after that: the exact place of a rank is found among the few
elements that the table leaves. `workers.merging.statistics` computes tables of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from workers.merging.masks import hashes

__all__ = [
    "ALL",
    "LARGEST_MARK",
    "NOTHING",
    "SPACING",
    "MagnitudeTable",
    "Place",
    "TieOrder",
    "Trim",
    "magnitude_keys",
    "place_of_rank",
]

# The table holds one element in SPACING: 9 bytes for 128 elements, and a rank lies among at most 127 of them.
SPACING = 128
LARGEST_MARK = 2**32 - 1


@dataclass(frozen=True, order=True)
class Place:
    """A place in the order of a tensor's elements: a magnitude, and the mark of an element that has it."""

    magnitude: float
    mark: int

    @property
    def key(self) -> int:
        """The place as one number, as of `magnitude_keys`."""
        return int(np.float32(self.magnitude).view(np.uint32)) << 32 | self.mark

    def reached_by(self, magnitudes: torch.Tensor, order: TieOrder) -> torch.Tensor:
        """Bool: which elements of a tensor are at this place or above."""
        equal = (magnitudes == self.magnitude).flatten()
        reached = (magnitudes > self.magnitude).flatten()
        at = equal.nonzero().flatten()
        reached[at] = order.marks_at(at) >= self.mark
        return reached.view(magnitudes.shape)


@dataclass(frozen=True)
class TieOrder:
    """How elements of equal magnitude are ordered: by the marks of `key`. With `keeps_equal`, all elements whose
    magnitude equals that at a rank have the rank: recipes of format 1 are merged so."""

    key: int
    keeps_equal: bool = False

    @property
    def factor(self) -> int:
        """The odd factor of marks: the hash of index 0 with the key, with its last bit set."""
        return int(hashes(self.key, torch.zeros(1, dtype=torch.int64))) | 1

    def marks_at(self, positions: torch.Tensor) -> torch.Tensor:
        """The marks of the elements at these positions: int64 in [0, 2^32)."""
        return (hashes(0, positions) * self.factor) & LARGEST_MARK

    def lowest(self, place: Place) -> Place:
        """The place from which on elements count, if those at `place` do."""
        return Place(place.magnitude, 0) if self.keeps_equal else place

    def above(self, place: Place) -> Place:
        """The lowest place above `place`, if elements at `place` count."""
        if self.keeps_equal or place.mark == LARGEST_MARK:
            return Place(float(np.nextafter(np.float32(place.magnitude), np.float32(np.inf))), 0)
        return Place(place.magnitude, place.mark + 1)


@dataclass(frozen=True)
class Trim:
    """Where a rank lies: at `high` if `low` equals it; else strictly between the two, where fewer than `SPACING`
    elements are, of which `num_smaller` precede it in ascending order.

    `is_tied`: other elements have the magnitude of one of the two places, so magnitudes alone do not decide."""

    low: Place
    high: Place
    num_smaller: int = 0
    is_tied: bool = False

    @classmethod
    def at(cls, place: Place, *, is_tied: bool = False) -> Self:
        return cls(place, place, is_tied=is_tied)


# No magnitude is below 0, and none is above infinity: these keep all elements and none.
ALL = Trim.at(Place(0.0, 0))
NOTHING = Trim.at(Place(float("inf"), LARGEST_MARK))


class MagnitudeTable:
    """Every 128th element in ascending order, and the last: `magnitudes`, `marks`, and whether a neighbour has the
    same magnitude (`is_tied`); of `num_elements`, of which `num_zeros` are zero."""

    def __init__(
        self,
        magnitudes: np.ndarray,
        marks: np.ndarray,
        is_tied: np.ndarray,
        *,
        num_elements: int,
        num_zeros: int,
    ) -> None:
        self._magnitudes = magnitudes
        self._marks = marks
        self._is_tied = is_tied
        self._num_elements = num_elements
        self.num_not_zero = num_elements - num_zeros

    @classmethod
    def of_ascending(cls, ascending: Iterable[tuple[np.ndarray, np.ndarray]]) -> Self:
        """The table of float32 magnitudes and uint32 marks that come in ascending order, in pieces, equal magnitudes
        in one piece. There is at least one piece, and none is empty. A piece is not used after the next is taken."""
        columns: list[tuple[np.ndarray, ...]] = []
        total = num_zeros = 0
        for sizes, marks in ascending:
            columns.append(_rows(sizes, marks, np.arange(-total % SPACING, sizes.size, SPACING)))
            last = _rows(sizes, marks, np.array([sizes.size - 1]))
            num_zeros += int(np.searchsorted(sizes, 0, side="right"))
            total += sizes.size
        rows = (np.concatenate(column) for column in zip(*columns, last, strict=True))
        return cls(*rows, num_elements=total, num_zeros=num_zeros)

    @property
    def num_bytes(self) -> int:
        return self._magnitudes.nbytes + self._marks.nbytes + self._is_tied.nbytes

    def trim(self, rank: int) -> Trim:
        """Where the element of the `rank`-th largest magnitude is; ranks are from 1 to the number of elements."""
        cut, after = divmod(self._num_elements - rank, SPACING)
        low = self._place(cut)
        if after == 0:
            return Trim.at(low, is_tied=bool(self._is_tied[cut]))
        high = self._place(cut + 1)
        if rank == 1:
            return Trim.at(high, is_tied=bool(self._is_tied[cut + 1]))
        return Trim(low, high, after - 1, is_tied=bool(self._is_tied[cut] or self._is_tied[cut + 1]))

    def place(self, rank: int, sizes: torch.Tensor, order: TieOrder) -> Place:
        """The place of the `rank`-th largest of `sizes`, the magnitudes (float32) of which this is the table."""
        trim = self.trim(rank)
        if trim.low == trim.high:
            return trim.high
        flat = sizes.flatten()
        at = ((flat >= trim.low.magnitude) & (flat <= trim.high.magnitude)).nonzero().flatten()
        keys = (flat[at].view(torch.int32).long() << 32) | order.marks_at(at)
        return _place(int(keys[(keys > trim.low.key) & (keys < trim.high.key)].sort().values[trim.num_smaller]))

    def _place(self, cut: int) -> Place:
        return Place(float(self._magnitudes[cut]), int(self._marks[cut]))


def _rows(sizes: np.ndarray, marks: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, ...]:
    """Of the elements at these positions of a piece: magnitude, mark, and whether a neighbour has the magnitude."""
    found = sizes[at]
    before, after = sizes[np.maximum(at - 1, 0)], sizes[np.minimum(at + 1, sizes.size - 1)]
    is_tied = ((before == found) & (at > 0)) | ((after == found) & (at < sizes.size - 1))
    return found, marks[at], is_tied


def place_of_rank(sizes: torch.Tensor, rank: int, order: TieOrder, table: MagnitudeTable | None = None) -> Place:
    """The place of the `rank`-th largest of `sizes`, magnitudes in float32, from 1; `table` is their table if known."""
    if table is not None:
        return table.place(rank, sizes, order)
    flat = sizes.flatten()
    magnitude = torch.kthvalue(flat, flat.numel() - rank + 1).values
    at = (flat == magnitude).nonzero().flatten()
    num_larger = int(torch.count_nonzero(flat > magnitude))
    found = order.marks_at(at).sort(descending=True).values[rank - 1 - num_larger]
    return Place(float(magnitude), int(found))


# A place as one number: the bits of a float32 that is not negative are ordered as the number is.


def magnitude_keys(sizes: torch.Tensor, order: TieOrder) -> torch.Tensor:
    """The places of all elements as one number each, by their magnitudes in float32: int64, of the shape of `sizes`.
    With `keeps_equal`, elements of equal magnitude have equal numbers."""
    keys = sizes.float().contiguous().view(torch.int32).long() << 32
    if not order.keeps_equal:
        keys |= order.marks_at(torch.arange(sizes.numel(), device=sizes.device)).view(sizes.shape)
    return keys


def _place(key: int) -> Place:
    return Place(float(np.uint32(key >> 32).view(np.float32)), key & LARGEST_MARK)
