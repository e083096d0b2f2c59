"""Distribution of the elements of a trained expert's task vector, and fits by Laplace and normal distributions.

Paper: "MergOPT: A merge-aware optimizer for robust model merging", table 10, and figure 1 (the sum of all experts' task
vectors).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.models.checkpoints import open_checkpoint, read_expert
from workers.training.mergopt.fit import SAMPLE, Fit, fit, merged_tensors, sample_of

__all__ = ["ACCUMULATED", "TaskVector", "accumulated_vector", "task_vector"]

# The name of the sum of all experts' task vectors, in place of an expert's alias.
ACCUMULATED = "sum of all"

BINS = 61

# The histogram ends at this many Laplace scales on both sides: exp(-8) of the fitted mass is outside.
REACH = 8.0


@dataclass(frozen=True)
class TaskVector:
    """Distribution of the elements of an expert's task vector (expert minus base).

    `density` has the shares of elements in bins between `edges` (one edge more than bins), divided by the bins' width.
    Elements that are exactly zero are left out of it; their share of all elements is `fits[0].zeros`. `fits` are the
    fits of Laplace's and Gauss' distributions.
    """

    expert: str
    fits: tuple[Fit, ...]
    edges: tuple[float, ...]
    density: tuple[float, ...]


def task_vector(alias: str, base: Path, expert: Path) -> TaskVector:
    """Measure the distribution of one expert's task vector (expert minus base) on about a million of its elements.

    `alias` is the expert's alias, which the result names. `base` and `expert` are directories. Raises InvalidModel if a
    model cannot be used, and ValueError if the task vector is 0.
    """
    return _distribution(alias, sample_of(base, [expert]))


def accumulated_vector(base: Path, experts: Sequence[Path]) -> TaskVector:
    """Measure the distribution of the sum of all experts' task vectors on about a million of its elements.

    `base` and `experts` are directories. The elements are evenly spaced in the tensors that any expert changes, without
    those that are never merged, such as heads of tasks. Raises InvalidModel if a model cannot be used, and ValueError
    if all task vectors are 0.
    """
    origin = open_checkpoint(base)
    opened = [each for expert in experts if (each := read_expert(expert, origin)) is not None]
    by_expert = [set(merged_tensors(origin, each)) for each in opened]
    shared = [name for name in origin.tensors if all(name in names for names in by_expert)]
    every = max(1, sum(math.prod(origin.tensors[name].shape) for name in shared) // SAMPLE)
    parts = []
    for name in shared:
        start = origin.read(name).flatten()[::every].float()
        total = torch.stack([each.read(name).flatten()[::every].float() - start for each in opened]).sum(dim=0)
        if total.any():
            parts.append(total)
    return _distribution(ACCUMULATED, torch.cat(parts) if parts else torch.zeros(1))


def _distribution(alias: str, elements: torch.Tensor) -> TaskVector:
    """The distribution of the numbers `elements` of a task vector. Raises ValueError if all elements are 0.

    `alias` is the alias that the result names.
    """
    changed = elements[elements != 0].double()
    fits = (fit(elements, "laplace"), fit(elements, "gaussian"))
    reach = REACH * (float(changed.abs().mean()) if len(changed) else 1.0)
    edges = torch.linspace(-reach, reach, BINS + 1, dtype=torch.float64)
    counts = torch.histogram(changed, edges).hist
    density = counts / (len(elements) * float(edges[1] - edges[0]))
    return TaskVector(alias, fits, tuple(edges.tolist()), tuple(density.tolist()))
