"""Trimmed task vectors that are rescaled to the sum of magnitudes they had (mergekit: `rescale: true`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.merging.methods import consensus
from workers.merging.methods.registry import merges
from workers.merging.methods.sparsify import match_l1_norm
from workers.merging.methods.task_vectors import Magnitudes, Orders, trimmed_breadcrumbs, trimmed_task_vectors

__all__ = ["breadcrumbs_l1", "breadcrumbs_ties_l1", "ties_weighted_l1"]


@merges("ties_weighted_l1")
def ties_weighted_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    lambda_: float,
    normalize: bool,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`ties_weighted` (mergekit's TIES) of task vectors that have their sum of magnitudes again."""
    taus = _rescaled(trimmed_task_vectors(tensors, base, densities, magnitudes, orders), tensors, base)
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


@merges("breadcrumbs_l1")
def breadcrumbs_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    gammas: Sequence[float],
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`breadcrumbs` (arXiv:2312.06795) of task vectors that have their sum of magnitudes again."""
    merged = base.clone()
    crumbs = trimmed_breadcrumbs(tensors, base, densities, gammas, magnitudes, orders)
    for tau, lambda_ in zip(_rescaled(crumbs, tensors, base), lambdas, strict=True):
        merged += tau.mul_(lambda_)
    return merged


@merges("breadcrumbs_ties_l1")
def breadcrumbs_ties_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    gammas: Sequence[float],
    lambda_: float,
    normalize: bool,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`breadcrumbs_ties` (mergekit) of task vectors that have their sum of magnitudes again."""
    taus = _rescaled(trimmed_breadcrumbs(tensors, base, densities, gammas, magnitudes, orders), tensors, base)
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


def _rescaled(taus: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor], base: torch.Tensor) -> list[torch.Tensor]:
    return [match_l1_norm(tau, tensor - base) for tau, tensor in zip(taus, tensors, strict=True)]
