"""Choice of a step by the Wolpertinger policy: the best of the k steps that are nearest to a proto-action.

A proto-action is the point that a policy draws in the space of the steps' embeddings. The best step is the step with
the best expected outcome. Dulac-Arnold et al., "Deep Reinforcement Learning in Large Discrete Action Spaces" (2015),
section 4, with the value of the state after a step in place of the action-value, as in HM3. Axes: B episodes, A steps,
C candidates.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["choose", "nearest"]


def nearest(protos_BD: Tensor, embeddings_AD: Tensor, allowed_BA: Tensor, *, k: int) -> tuple[Tensor, Tensor]:
    """Find, for each of B points, the allowed steps of a layer path whose embeddings are nearest to it.

    A layer path is a sequence of layers; each layer is a step of the path. The points `protos_BD` are proto-actions
    that a policy draws. `embeddings_AD` are the embeddings of all A steps, with D numbers each. `allowed_BA` says which
    steps are allowed for each point. Distances are Euclidean.

    Returns two tensors. The first has the indices of the C nearest steps, [B, C], the nearest first; of equally near
    steps, the step with the smaller index comes first. C is the smaller of `k` and A. If fewer than C steps are
    allowed, the last indices of a row are of steps that are not allowed. The second tensor, bool [B, C], is False for
    steps that are not allowed.
    """
    distances = torch.linalg.vector_norm(embeddings_AD - protos_BD[:, None], dim=2)
    distances = torch.where(allowed_BA, distances, torch.inf)
    order = torch.sort(distances, dim=1, stable=True).indices[:, :k]
    return order, torch.arange(order.shape[1]) < allowed_BA.sum(dim=1, keepdim=True)


def choose(outcomes_BC: Tensor, is_candidate_BC: Tensor, *, explores_B: Tensor, draws_B: Tensor) -> Tensor:
    """Choose one of C candidates for the next step of a layer path, in each of B episodes; return the indices [B].

    A layer path is a sequence of layers of several models; each episode builds one. `outcomes_BC` are the expected
    outcomes of the candidates. The candidate with the largest outcome is chosen. Of several equally good candidates,
    the first candidate is chosen, which is the nearest candidate. `is_candidate_BC` is False for places without a
    candidate. In episodes where `explores_B` is True, any of the candidates is chosen with equal probability instead.
    The random numbers `draws_B`, in [0, 1), determine this choice.
    """
    best = torch.where(is_candidate_BC, outcomes_BC, -torch.inf).argmax(dim=1)
    counts = is_candidate_BC.sum(dim=1)
    drawn = torch.minimum((draws_B * counts).long(), counts - 1)
    return torch.where(explores_B, drawn, best)
