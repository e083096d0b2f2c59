"""Trimming of task vectors, the first step of several methods: dropping the smallest elements, or also the largest.

`magnitudes` are the tables of |source - base|, one per source, if known; `orders` determine the order of elements of
equal magnitude in each source. With `rescale`, the kept elements are scaled to the L1 norm of the whole task vector
(mergekit: `rescale: true`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge
from workers.merging.methods.arithmetic import num_kept
from workers.merging.methods.sparsify import cut_both_ends, cut_ranks, match_l1_norm, trimmed
from workers.merging.order_statistics import Ranked, TieOrder

__all__ = ["Magnitudes", "Orders", "each_order", "trim_ranks", "trimmed_breadcrumbs", "trimmed_task_vectors"]

Magnitudes = Sequence[Ranked | None] | None
Orders = Sequence[TieOrder] | None


def trimmed_task_vectors(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    shares: Sequence[float],
    magnitudes: Magnitudes = None,
    orders: Orders = None,
    *,
    rescale: bool = False,
) -> list[torch.Tensor]:
    """The task vectors (tensors minus base), with all but their largest-magnitude elements set to zero.

    `shares` has the share of elements to keep for each tensor. `magnitudes` has, for each tensor, a precomputed table
    of the magnitudes |tensor - base|, from which the threshold is taken; None computes the threshold without a table.
    `orders` has, for each tensor, the rule that breaks ties between equal magnitudes. With `rescale`, each result is
    scaled to the L1 norm of the whole task vector.
    """
    known = magnitudes or (None,) * len(tensors)
    taus = [
        trimmed(tensor - base, share, order, table)
        for tensor, share, order, table in zip(tensors, shares, each_order(orders, tensors), known, strict=True)
    ]
    return _rescaled(taus, tensors, base) if rescale else taus


def trimmed_breadcrumbs(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    densities: Sequence[float],
    gammas: Sequence[float],
    magnitudes: Magnitudes,
    orders: Orders,
    *,
    rescale: bool = False,
) -> list[torch.Tensor]:
    """The task vectors (tensors minus base) with their largest and smallest elements set to zero (Model Breadcrumbs).

    Each of these arguments has an entry for each tensor:

    - `densities`: the share of elements to keep
    - `gammas`: the share of elements to drop at the top
    - `magnitudes`: a precomputed table of the magnitudes |tensor - base|, from which thresholds are taken; None
      computes the thresholds without a table
    - `orders`: the rule that breaks ties between equal magnitudes

    With `rescale`, each result is scaled to the L1 norm of the whole task vector.
    """
    known = magnitudes or (None,) * len(tensors)
    shares = zip(densities, gammas, each_order(orders, tensors), strict=True)
    taus = [
        cut_both_ends(tensor - base, *each, table) for tensor, each, table in zip(tensors, shares, known, strict=True)
    ]
    return _rescaled(taus, tensors, base) if rescale else taus


def trim_ranks(merge: Merge, num_elements: int) -> list[tuple[int, ...]]:
    """Ranks of the magnitudes that the method of `merge` uses as thresholds, for each source.

    Rank 1 is the largest of `num_elements` magnitudes. For TIES, each source has one rank. For Model Breadcrumbs, each
    source has two ranks: of the largest and of the smallest magnitude that is kept. If the method keeps all elements,
    or drops all elements, the source has no rank. The method must be one that trims (field `MergeMethod.trims`).
    """
    declared = METHODS[merge.method]
    if declared.coefficient("gamma") is None:
        share = "density" if declared.coefficient("k") is None else "k"
        return [(num_kept(number, num_elements),) for number in merge.per_source(share)]
    shares = zip(merge.per_source("density"), merge.per_source("gamma"), strict=True)
    cuts = [cut_ranks(density, gamma, num_elements) for density, gamma in shares]
    return [() if cut is None or cut.is_empty else (cut.largest, cut.smallest) for cut in cuts]


def each_order(orders: Orders, tensors: Sequence[torch.Tensor]) -> Sequence[TieOrder]:
    """Rules for ordering elements of equal magnitude, one for each of `tensors`.

    The result is `orders`, or default rules if `orders` is None. By default each tensor has a rule of its own, which is
    the same at every call.
    """
    return [TieOrder(place) for place in range(len(tensors))] if orders is None else orders


def _rescaled(taus: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], base: torch.Tensor) -> list[torch.Tensor]:
    return [match_l1_norm(tau, tensor - base) for tau, tensor in zip(taus, tensors, strict=True)]
