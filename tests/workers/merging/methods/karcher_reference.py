"""The Karcher mean's iteration on whole vectors in float64, as in arXiv:2603.04972 and mergekit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

TOLERANCE = 1e-5  # a step that is shorter ends the iteration, in mergekit and here


def iterates(
    tensors: Sequence[torch.Tensor], weights: Sequence[float], num_steps: int
) -> list[tuple[torch.Tensor, float]]:
    """Merged tensors after 0 to `num_steps` steps, each with the length of the step that would follow.

    The merged tensors are float64, the lengths are angles. The given tensors are not zero, and no two of them are
    opposite.
    """
    shares = [weight / math.fsum(weights) for weight in weights]
    vectors = [tensor.double() for tensor in tensors]
    norms = [vector.norm() for vector in vectors]
    units = [vector / norm for vector, norm in zip(vectors, norms, strict=True)]
    size = sum(share * norm for share, norm in zip(shares, norms, strict=True))
    mean = sum((share * unit for share, unit in zip(shares, units, strict=True)), torch.zeros_like(units[0]))
    mean /= mean.norm()
    found = []
    for _ in range(num_steps + 1):
        step = torch.zeros_like(mean)
        for share, unit in zip(shares, units, strict=True):
            across = unit - (unit * mean).sum() * mean  # sin theta times the direction of the logarithm
            sine = across.norm()
            if sine > 0:
                step += share * torch.atan2(sine, (unit * mean).sum()) / sine * across
        length = step.norm()
        found.append((size * mean, float(length)))
        if length > 0:
            mean = torch.cos(length) * mean + torch.sin(length) / length * step
            mean /= mean.norm()
    return found
