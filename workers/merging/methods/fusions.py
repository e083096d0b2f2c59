"""Fusions of two models, element by element: NearSwap and Arcee Fusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from workers.merging.methods.arithmetic import CHUNK
from workers.merging.methods.peaks import Peak
from workers.merging.methods.registry import merges

__all__ = ["Importance", "ImportancesAt", "arcee_fusion", "importance_of", "importances_at", "nearswap"]


@merges("nearswap", peak=Peak(0, 16))
def nearswap(tensors: Sequence[torch.Tensor], *, t: float) -> torch.Tensor:
    """The first model, with each element moved towards the second model by at most `t` (mergekit's NearSwap).

    theta_1 and theta_2 are the tensors of the two models. The result is w theta_2 + (1 - w) theta_1 with w = min(1, t /
    |theta_1 - theta_2|).
    """
    first, second = tensors
    share = (t / (first - second).abs_().clamp_(min=1e-6)).clamp_(max=1)
    return share * second + (1 - share) * first


@dataclass(frozen=True)
class Importance:
    """Rule by which Arcee Fusion selects the elements of the second of two models: row factors and a threshold.

    The importance of an element is the magnitude of the two models' difference, times the factor of the element's row
    in `rows` (float32 [..., 1]). The element is taken if its importance is at least `threshold`, a float32 value.
    """

    rows: torch.Tensor
    threshold: float


# A function that returns the importances at the given indices (from 0) in ascending order; its third tensor is `rows`.
ImportancesAt = Callable[[Sequence[int], torch.Tensor, torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]


@merges("arcee_fusion", peak=Peak(0, 9))
def arcee_fusion(tensors: Sequence[torch.Tensor], *, importance: Importance | None = None) -> torch.Tensor:
    """The first model with the most important changes of the second model (mergekit's Arcee Fusion).

    theta_1 and theta_2 are the tensors of the two models. The importance of an element is |theta_2 - theta_1| *
    KL(softmax of theta_2's row | softmax of theta_1's row), with KL the Kullback-Leibler divergence. Elements whose
    importance is at least median + 1.5 (Q3 - Q1) are taken from the second model. Q1 and Q3 are the quartiles over the
    whole tensor: the element at floor(q (n - 1)) of the n sorted importances, with q = 1/4 and 3/4. `importance` is the
    precomputed result of the function `importance_of` for the two tensors; None computes it.
    """
    first, second = tensors
    delta = second - first
    known = importance or importance_of(first.cpu(), second.cpu())
    return delta.masked_fill_(delta.abs().mul_(known.rows.to(delta.device)) < known.threshold, 0).add_(first)


def importances_at(
    indices: Sequence[int], first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor
) -> list[torch.Tensor]:
    """Find the importances at given `indices` in the ascending list of the importances of all elements.

    The importance of an element is the absolute difference of `first` and `second`, times the factor of its row in
    `rows`. The merge method Arcee Fusion takes elements of high importance from the second model. The result contains a
    tensor with one number for each of `indices`; index 0 is the smallest importance.
    """
    importances = ((second.float() - first.float()).abs_() * rows).flatten()
    return [torch.kthvalue(importances, index + 1).values for index in indices]


def importance_of(first: torch.Tensor, second: torch.Tensor, select: ImportancesAt = importances_at) -> Importance:
    """The rule by which Arcee Fusion selects the elements to take from `second`: row factors and a threshold.

    The other elements of the merge are taken from `first`. The row factors multiply |second - first| to give the
    importance of an element. The threshold is the smallest importance of an element that is taken. The tensors are on
    CPU and have at least one element. `select` is a function like `importances_at`, which returns the importances at
    given indices of the sorted importances.
    """
    width = first.shape[-1] if first.dim() else 1
    parts = (torch.split(tensor.reshape(-1, width), max(1, CHUNK // width)) for tensor in (second, first))
    rows = torch.cat([_divergences(p.float(), q.float()) for p, q in zip(*parts, strict=True)])
    rows = rows.view(*first.shape[:-1], 1)
    ranks = first.numel() - 1
    lower, median, upper = select([quarter * ranks // 4 for quarter in (1, 2, 3)], first, second, rows)
    return Importance(rows, float(median + 1.5 * (upper - lower)))


def _divergences(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Kullback-Leibler divergence of softmax(row of `first`) from softmax(row of `second`), for each row.

    Rounding may make the divergence of nearly equal rows slightly negative.
    """
    p, q = (torch.softmax(tensor, dim=-1).add_(1e-8) for tensor in (first, second))
    return (p * torch.log(p / q)).sum(dim=-1)
