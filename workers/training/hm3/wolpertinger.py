"""From a proto-action to a step: the k nearest steps by embedding, of which the one is taken whose outcome is best.

Dulac-Arnold et al., "Deep Reinforcement Learning in Large Discrete Action Spaces" (2015), section 4, with the value of
the state after a step in place of the action-value, as HM3's authors describe it.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose", "nearest"]


def nearest(proto_D: Tensor, embeddings_AD: Tensor, allowed_A: Tensor, *, k: int) -> Tensor:
    """The numbers of the at most `k` allowed steps whose embeddings are nearest to the proto-action (Euclidean),
    nearest first; of equal ones the smaller number first."""
    distances = torch.linalg.vector_norm(embeddings_AD - proto_D, dim=1)
    distances = torch.where(allowed_A, distances, torch.inf)
    order = torch.sort(distances, stable=True).indices
    return order[: min(k, int(allowed_A.sum()))]


def choose(candidates: Tensor, outcomes: Tensor, *, explores: bool, generator: torch.Generator) -> int:
    """One of the candidates: the one with the largest outcome (of equal ones the nearest), or with `explores` one drawn
    uniformly."""
    if explores:
        return int(candidates[int(torch.randint(len(candidates), (), generator=generator))])
    return int(candidates[int(torch.argmax(outcomes))])
