"""The distribution of a trained expert's task vector, and how well Laplace's and Gauss' distributions fit it.

Paper: "MergOPT: A merge-aware optimizer for robust model merging", table 10.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from workers.training.mergopt.fit import Fit, fit, sample_of

__all__ = ["TaskVector", "task_vector"]

BINS = 61

# The histogram ends at this many Laplace scales on both sides: exp(-8) of the fitted mass is outside.
REACH = 8.0


@dataclass(frozen=True)
class TaskVector:
    """The distribution of the elements of an expert's task vector (expert minus base).

    `density` has the shares of elements in bins between `edges` (one edge more than bins), divided by the bins' width.
    Elements that are exactly zero are left out of it; their share of all elements is `fits[0].zeros`. `fits` are the
    fits of Laplace's and Gauss' distributions.
    """

    expert: str
    fits: tuple[Fit, ...]
    edges: tuple[float, ...]
    density: tuple[float, ...]


def task_vector(alias: str, base: Path, expert: Path) -> TaskVector:
    """Measure the distribution of one expert's task vector, from about a million of its elements.

    Raises InvalidModel, and ValueError if the task vector is 0.
    """
    elements = sample_of(base, [expert])
    changed = elements[elements != 0].double()
    fits = (fit(elements, "laplace"), fit(elements, "gaussian"))
    reach = REACH * (float(changed.abs().mean()) if len(changed) else 1.0)
    edges = torch.linspace(-reach, reach, BINS + 1, dtype=torch.float64)
    counts = torch.histogram(changed, edges).hist
    density = counts / (len(elements) * float(edges[1] - edges[0]))
    return TaskVector(alias, fits, tuple(edges.tolist()), tuple(density.tolist()))
