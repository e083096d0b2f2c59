"""Order statistics of a task vector's magnitudes: a small table that narrows any rank to a few elements.

With it no candidate needs a sort to find which elements to keep: the exact magnitude is looked for among those few, in
the pass that merges. This depends on nothing but the two tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

__all__ = ["SPACING", "MagnitudeTable", "Trim"]

# One magnitude in so many is in the table: 9 bytes for 128 elements, and a rank is left with at most 127 of them.
SPACING = 128


@dataclass(frozen=True)
class Trim:
    """The magnitude of a given rank: `high` where that is `low` too; else one of those strictly between the two, fewer
    than `SPACING`, of which `num_smaller` are smaller or equal and before it in ascending order."""

    low: float
    high: float
    num_smaller: int = 0


class MagnitudeTable:
    """Every 128th of the ascending magnitudes and the largest, how many elements are no larger than each, and how many
    of the up to 128 before its place equal it."""

    def __init__(self, cuts: np.ndarray, no_larger: np.ndarray, equal_before: np.ndarray) -> None:
        self._cuts = cuts
        self._no_larger = no_larger
        self._equal_before = equal_before

    @classmethod
    def of(cls, source: torch.Tensor, base: torch.Tensor) -> Self:
        """The table of |source - base|, in float32, of at least one element. Sorts them: once for two tensors."""
        return cls._of(_ascending(source, base))

    @classmethod
    def of_variances(cls, sources: Sequence[torch.Tensor], base: torch.Tensor) -> Self:
        """The table of the variances between task vectors (`merge_methods.competition.variance`)."""
        return cls._of(_ascending_variances(sources, base))

    @classmethod
    def _of(cls, ascending: Iterator[np.ndarray]) -> Self:
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
        """Where the `rank`-th largest magnitude is, from 1 to the number of elements."""
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
        """The `rank`-th largest magnitude of `tau`, the task vector that the table is of; float32, no dimensions."""
        trim = self.trim(rank)
        if trim.low < trim.high:
            sizes = tau.abs()
            return sizes[(sizes > trim.low) & (sizes < trim.high)].sort().values[trim.num_smaller]
        return torch.tensor(trim.high, dtype=torch.float32, device=tau.device)


def _ascending(source: torch.Tensor, base: torch.Tensor) -> Iterator[np.ndarray]:
    if source.is_cuda:
        yield (source.float() - base.float()).abs_().flatten().sort().values.cpu().numpy()
    else:
        from workers.merging.kernels.sorting import ascending_magnitudes

        yield from ascending_magnitudes(source, base)


def _ascending_variances(sources: Sequence[torch.Tensor], base: torch.Tensor) -> Iterator[np.ndarray]:
    if base.is_cuda:
        from workers.merging.methods.competition import variance

        yield variance(sources, base).flatten().sort().values.cpu().numpy()
    else:
        from workers.merging.kernels.sorting import ascending_variances

        yield from ascending_variances(sources, base)
