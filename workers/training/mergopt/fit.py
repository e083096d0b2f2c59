"""Fits of MergOPT's noise to existing task vectors: its scale (`scale: auto`), and the quality of the fit.

Fits are compared by the Kolmogorov-Smirnov distance and mean log-likelihood of the paper's table 10 (appendix D.1.1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.errors import InvalidModel
from workers.models.checkpoints import Checkpoint, open_checkpoint, read_expert
from workers.training.mergopt.noise import Gaussian, Laplace, Noise

__all__ = ["Fit", "fit", "merged_tensors", "sample_of"]

# Elements of a task vector that are used, as in the paper's footnote 2.
SAMPLE = 1_000_000


@dataclass(frozen=True)
class Fit:
    """A zero-centred distribution fitted to the elements of task vectors by maximum likelihood.

    - `distribution`: "laplace" or "gaussian"
    - `scale`: b of Laplace's distribution, or the standard deviation of the normal distribution
    - `distance`: the Kolmogorov-Smirnov distance, in [0, 1], between the distribution and the elements
    - `log_likelihood`: the mean log-likelihood of an element (natural log)
    - `zeros`: the share of elements that are exactly 0 because of rounding to a short dtype
    - `num_elements`: the number of elements
    """

    distribution: str
    scale: float
    distance: float
    log_likelihood: float
    zeros: float
    num_elements: int

    @property
    def noise(self) -> Noise:
        return Laplace(self.scale) if self.distribution == "laplace" else Gaussian(self.scale)


def fit(elements: torch.Tensor, distribution: str = "laplace") -> Fit:
    """Fit a zero-centred distribution to `elements` [n] of task vectors by maximum likelihood.

    The scale is the mean of |x| over the elements x for "laplace", and the root of the mean of x^2 for "gaussian".
    Raises ValueError if `distribution` is another name, or if all elements are 0.
    """
    x = elements.detach().flatten().double().sort().values
    if not x.numel() or not bool(x.abs().max() > 0):
        raise ValueError("mergopt: the task vectors are 0; expected experts that differ from their base")
    if distribution == "laplace":
        scale = float(x.abs().mean())
        below = 0.5 * torch.exp(-x.abs() / scale)
        cumulative = torch.where(x < 0, below, 1 - below)
        likelihood = -math.log(2 * scale) - 1.0
    elif distribution == "gaussian":
        scale = float(x.square().mean().sqrt())
        cumulative = torch.special.ndtr(x / scale)
        likelihood = -math.log(scale) - 0.5 * math.log(2 * math.pi) - 0.5
    else:
        raise ValueError(f"mergopt: distribution {distribution!r}; expected laplace or gaussian")
    steps = torch.arange(x.numel() + 1, dtype=torch.float64) / x.numel()
    distance = max(float((steps[1:] - cumulative).max()), float((cumulative - steps[:-1]).max()))
    return Fit(distribution, scale, distance, likelihood, float((x == 0).double().mean()), x.numel())


def sample_of(base: Path, experts: Sequence[Path], *, num_elements: int = SAMPLE) -> torch.Tensor:
    """Sample about `num_elements` elements of the experts' task vectors (expert minus base), in float32.

    Each expert gives about the same number of elements, which are evenly spaced in its tensors. Tensors that an expert
    has unchanged from the base are left out, because they were not trained, and so are those that are never merged,
    such as heads of tasks. `base` and `experts` are directories; experts are whole models or adapters. Raises
    InvalidModel if a model cannot be used, or if an expert has no tensor in common with the base.
    """
    origin = open_checkpoint(base)
    return torch.cat([_spaced(origin, expert, num_elements // len(experts)) for expert in experts])


def merged_tensors(base: Checkpoint, expert: Checkpoint) -> list[str]:
    """Names of the expert's tensors that merges use: those of the base with equal shapes, without heads of tasks."""
    heads = {*base.layout.task_heads, *expert.layout.task_heads}
    shapes = {name: tensor.shape for name, tensor in base.tensors.items() if name not in heads}
    return [name for name, tensor in expert.tensors.items() if shapes.get(name) == tensor.shape]


def _spaced(base: Checkpoint, directory: Path, num_elements: int) -> torch.Tensor:
    expert = read_expert(directory, base)
    assert expert is not None
    shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
    shared = merged_tensors(base, expert)
    if not shared:
        raise InvalidModel((f"{directory}: has no tensor in common with {base.directory}",))
    changed = [name for name in shared if _is_changed(base.read(name), expert.read(name))]
    every = max(1, sum(math.prod(shapes[name]) for name in changed) // max(1, num_elements))
    parts = [
        expert.read(name).flatten()[::every].float() - base.read(name).flatten()[::every].float() for name in changed
    ]
    return torch.cat(parts) if parts else torch.zeros(1)


def _is_changed(origin: torch.Tensor, own: torch.Tensor) -> bool:
    """Whether an expert's tensor `own` differs from the base's tensor `origin`, after rounding to the coarser dtype."""
    coarser = min(own.dtype, origin.dtype, key=lambda dtype: dtype.itemsize)
    return not torch.equal(own.to(coarser), origin.to(coarser))
