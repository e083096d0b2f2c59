"""From proto-actions to steps: the k nearest steps by embedding, of which the one is taken whose outcome is best.

Dulac-Arnold et al., "Deep Reinforcement Learning in Large Discrete Action Spaces" (2015), section 4, with the value of
the state after a step in place of the action-value, as HM3's authors describe it. B episodes, A steps, C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose", "nearest"]


def nearest(protos_BD: Tensor, embeddings_AD: Tensor, allowed_BA: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """[B, C] each: the numbers of the allowed steps whose embeddings are nearest to each proto-action (Euclidean),
    nearest first, of equal ones the smaller number first; and which of them are candidates. C is the smaller of `k` and
    A; where fewer steps are allowed, the last numbers of a row are no candidates."""
    distances = torch.linalg.vector_norm(embeddings_AD - protos_BD[:, None], dim=2)
    distances = torch.where(allowed_BA, distances, torch.inf)
    order = torch.sort(distances, dim=1, stable=True).indices[:, :k]
    return order, torch.arange(order.shape[1]) < allowed_BA.sum(dim=1, keepdim=True)


def choose(outcomes_BC: Tensor, is_candidate_BC: Tensor, *, explores_B: Tensor, draws_B: Tensor) -> Tensor:
    """[B]: the place of one of the candidates: of the one with the largest outcome (of equal ones the nearest), or
    where an episode explores that which its draw from [0, 1) names, all of them equally likely."""
    best = torch.where(is_candidate_BC, outcomes_BC, -torch.inf).argmax(dim=1)
    counts = is_candidate_BC.sum(dim=1)
    drawn = torch.minimum((draws_B * counts).long(), counts - 1)
    return torch.where(explores_B, drawn, best)
