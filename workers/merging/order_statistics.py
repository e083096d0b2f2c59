"""Order statistics of a task vector's magnitudes: a small table that narrows any rank to a few elements.

A table is computed once from the sources. No merge sorts after that: the exact magnitude of a rank is found among the
few elements that the table leaves. `workers.merging.statistics` computes tables of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

__all__ = ["SPACING", "MagnitudeTable", "Trim"]

# The table holds one magnitude in SPACING: 9 bytes for 128 elements, and a rank lies among at most 127 of them.
SPACING = 128


@dataclass(frozen=True)
class Trim:
    """The magnitude of a given rank: `high` if `low` equals it; else one of the magnitudes strictly between the two,
    fewer than `SPACING`, of which `num_smaller` precede it in ascending order."""

    low: float
    high: float
    num_smaller: int = 0


class MagnitudeTable:
    """Every 128th of the ascending magnitudes and the largest; for each, how many elements are no larger, and how many
    of the up to 128 elements before it are equal to it."""

    def __init__(self, cuts: np.ndarray, no_larger: np.ndarray, equal_before: np.ndarray) -> None:
        self._cuts = cuts
        self._no_larger = no_larger
        self._equal_before = equal_before

    @classmethod
    def of_ascending(cls, ascending: Iterable[np.ndarray]) -> Self:
        """The table of float32 magnitudes that come in ascending order, in pieces; equal ones are in one piece.

        There is at least one piece, and none is empty. A piece is not used after the next is taken.
        """
        cuts, no_larger, smaller = [], [], []
        total = 0
        for ordered in ascending:
            cut = ordered[-total % SPACING :: SPACING].copy()
            cuts.append(cut)
            no_larger.append(np.searchsorted(ordered, cut, side="right") + total)
            smaller.append(np.searchsorted(ordered, cut) + total)
            largest, num_smaller = ordered[-1:].copy(), np.searchsorted(ordered, ordered[-1:]) + total
            total += ordered.size
        counts = np.concatenate([*no_larger, [total]])
        places = np.arange(len(counts)) * SPACING
        equal_before = (places - np.concatenate([*smaller, num_smaller])).clip(0, SPACING)
        return cls(
            np.concatenate([*cuts, largest]),
            counts.astype(np.uint32 if total < 2**32 else np.uint64),
            equal_before.astype(np.uint8),
        )

    @property
    def num_bytes(self) -> int:
        return self._cuts.nbytes + self._no_larger.nbytes + self._equal_before.nbytes

    @property
    def num_not_zero(self) -> int:
        zeros = self._no_larger[0] if self._cuts[0] == 0 else 0
        return int(self._no_larger[-1]) - int(zeros)

    def trim(self, rank: int) -> Trim:
        """Where the `rank`-th largest magnitude lies; ranks are from 1 to the number of elements."""
        position = int(self._no_larger[-1]) - rank  # in ascending order
        cut = position // SPACING
        low, high = float(self._cuts[cut]), float(self._cuts[cut + 1])
        num_smaller = position - int(self._no_larger[cut])
        if num_smaller < 0:
            return Trim(low, low)
        if (cut + 1) * SPACING - position <= int(self._equal_before[cut + 1]):
            return Trim(high, high)
        return Trim(low, high, num_smaller)

    def of_rank(self, rank: int, tau: torch.Tensor) -> torch.Tensor:
        """The `rank`-th largest magnitude of `tau`, the task vector of this table; float32, no dimensions."""
        trim = self.trim(rank)
        if trim.low < trim.high:
            sizes = tau.abs()
            return sizes[(sizes > trim.low) & (sizes < trim.high)].sort().values[trim.num_smaller]
        return torch.tensor(trim.high, dtype=torch.float32, device=tau.device)
