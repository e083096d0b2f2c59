"""Order statistics of a task vector's magnitudes: a small table that narrows any rank to a few elements.

With it no candidate needs a sort to find which elements to keep: the exact magnitude is looked for among those few, in
the pass that merges. This depends on nothing but the two tensors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

__all__ = ["SPACING", "MagnitudeTable", "Trim"]

# One magnitude in so many is in the table: 8 bytes for 128 elements, and a rank is left with at most 127 of them.
SPACING = 128


@dataclass(frozen=True)
class Trim:
    """Which magnitudes are at least the one of a given rank: all from `high` on; of those strictly between `low` and
    `high`, of which there are fewer than `SPACING`, all but the `num_smaller` smallest; none up to `low`.

    Where it is known at once, low = high = that magnitude, and there is nothing between.
    """

    low: float
    high: float
    num_smaller: int = 0


class MagnitudeTable:
    """Every 128th of the ascending magnitudes and the largest, and how many elements are no larger than each."""

    def __init__(self, cuts: np.ndarray, no_larger: np.ndarray) -> None:
        self._cuts = cuts
        self._no_larger = no_larger

    @classmethod
    def of(cls, source: torch.Tensor, base: torch.Tensor) -> Self:
        """The table of |source - base|, in float32, of at least one element. Sorts them: once for two tensors."""
        cuts, no_larger = [], []
        total = 0
        for ordered in _ascending(source, base):
            cut = ordered[-total % SPACING :: SPACING].copy()
            cuts.append(cut)
            no_larger.append(np.searchsorted(ordered, cut, side="right") + total)
            total += ordered.size
            largest = ordered[-1:].copy()
        counts = np.concatenate([*no_larger, [total]])
        return cls(np.concatenate([*cuts, largest]), counts.astype(np.uint32 if total < 2**32 else np.uint64))

    @property
    def num_bytes(self) -> int:
        return self._cuts.nbytes + self._no_larger.nbytes

    def trim(self, rank: int) -> Trim:
        """Where the `rank`-th largest magnitude is, from 1 to the number of elements."""
        position = int(self._no_larger[-1]) - rank  # in ascending order
        cut = position // SPACING
        low, high = float(self._cuts[cut]), float(self._cuts[cut + 1])
        num_smaller = position - int(self._no_larger[cut])
        return Trim(low, low) if num_smaller < 0 else Trim(low, high, num_smaller)

    def of_rank(self, rank: int, tau: torch.Tensor) -> torch.Tensor:
        """The `rank`-th largest magnitude of `tau`, the task vector that the table is of; float32, no dimensions."""
        trim = self.trim(rank)
        if trim.low < trim.high:
            sizes = tau.abs()
            between = sizes[(sizes > trim.low) & (sizes < trim.high)].sort().values
            if trim.num_smaller < len(between):
                return between[trim.num_smaller]
        return torch.tensor(trim.high, dtype=torch.float32, device=tau.device)


def _ascending(source: torch.Tensor, base: torch.Tensor) -> Iterator[np.ndarray]:
    if source.is_cuda:
        yield (source.float() - base.float()).abs_().flatten().sort().values.cpu().numpy()
    else:
        from workers.kernels.ordering import ascending_magnitudes

        yield from ascending_magnitudes(source, base)
