"""Task vectors without their smallest elements, or without both ends: the first step of several methods.

`magnitudes` are the tables of |source - base|, one per source, if known; `orders` say how elements of equal magnitude
are ordered in each source. With `rescale`, the sum of the magnitudes that are kept is that of the whole task vector
(mergekit: `rescale: true`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.merging.methods.sparsify import cut_both_ends, match_l1_norm, trimmed
from workers.merging.order_statistics import Ranked, TieOrder

__all__ = ["Magnitudes", "Orders", "each_order", "trimmed_breadcrumbs", "trimmed_task_vectors"]

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
    """The task vectors (tensors minus base), each with all but its largest magnitudes set to zero.

    `shares` has the share of elements to keep for each tensor. `magnitudes` has for each the table of |tensor - base|,
    if known, and `orders` the order of equal magnitudes. With `rescale` the results are scaled to the sum of magnitudes
    of the whole task vectors.
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
    """The task vectors (tensors minus base) without their largest and smallest elements (Model Breadcrumbs).

    Elements that are dropped are set to zero. For each tensor, `densities` has the share of elements to keep, `gammas`
    the share to drop at the top, `magnitudes` the table of |tensor - base|, if known, and `orders` the order of equal
    magnitudes. With `rescale` the results are scaled to the sum of magnitudes of the whole task vectors.
    """
    known = magnitudes or (None,) * len(tensors)
    shares = zip(densities, gammas, each_order(orders, tensors), strict=True)
    taus = [
        cut_both_ends(tensor - base, *each, table) for tensor, each, table in zip(tensors, shares, known, strict=True)
    ]
    return _rescaled(taus, tensors, base) if rescale else taus


def each_order(orders: Orders, tensors: Sequence[torch.Tensor]) -> Sequence[TieOrder]:
    """The order of elements of equal magnitude in each of `tensors`.

    It is `orders`, if given. Otherwise each tensor has an order of its own, the same at every call.
    """
    return [TieOrder(place) for place in range(len(tensors))] if orders is None else orders


def _rescaled(taus: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], base: torch.Tensor) -> list[torch.Tensor]:
    return [match_l1_norm(tau, tensor - base) for tau, tensor in zip(taus, tensors, strict=True)]
