"""Merge methods: pure functions from tensors to a tensor, each with its source and equation.

Equation numbers are those of "Automated Model Merging" (its section A.2 restates each method). All arithmetic is in
float32 on the tensors given, element by element in the order of the sources, without fused multiply-add; reductions
over a tensor are summed in fixed blocks. So the same operands give the same bits with any number of threads.

Which tensors belong together, where they come from and what they are rounded to is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COEFFICIENT_DECIMALS, Merge

__all__ = [
    "METHODS",
    "MergeMethod",
    "Operands",
    "cosine",
    "linear",
    "merge_tensors",
    "num_kept",
    "slerp",
    "task_arithmetic",
    "ties",
]

# Beyond this |cos| SLERP interpolates straight, see `slerp`. The value is the customary one.
COLLINEAR = 0.9995
# A tensor of a smaller Euclidean norm has no direction.
NO_DIRECTION = 1e-8
# Reductions sum blocks of this many elements, one by one, then the blocks exactly.
BLOCK = 4096


@dataclass(frozen=True)
class Operands:
    """The same tensor of every source, in the order of the merge's sources, float32 and of one shape. None is modified.

    `base` is the base model's, for methods that need it. What depends only on the sources may be known from an earlier
    merge: `cosine` of the first two tensors, and for each source its `magnitudes`, the sorted |source - base|.
    """

    tensors: tuple[torch.Tensor, ...]
    base: torch.Tensor | None = None
    cosine: float | None = None
    magnitudes: tuple[torch.Tensor | None, ...] | None = None


@dataclass(frozen=True)
class MergeMethod:
    """A named method. `merge` computes the merged tensor; `num_sources` None accepts any number from one."""

    name: str
    merge: Callable[[Operands, Merge], torch.Tensor]
    coefficients: tuple[str, ...] = ()
    needs_base: bool = False
    num_sources: int | None = None


def linear(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted average, eq. 11: sum_t w_t theta_t with sum_t w_t = 1 (model soups, arXiv:2203.05482).

    The weights are divided by their sum, since weights rounded to six decimals seldom sum to exactly one.
    Raises InvalidRecipe if they sum to zero.
    """
    total = math.fsum(weights)
    if abs(total) < 10.0**-COEFFICIENT_DECIMALS:
        raise InvalidRecipe(f"linear: weights {tuple(weights)} sum to {total}; they must not sum to zero")
    return _weighted_sum(tensors, [weight / total for weight in weights])


def task_arithmetic(tensors: Sequence[torch.Tensor], base: torch.Tensor, lambdas: Sequence[float]) -> torch.Tensor:
    """Eq. 4 and 5: theta_pre + sum_t lambda_t (theta_t - theta_pre) (arXiv:2212.04089).

    Eq. 5 has one lambda for all task vectors; one per task vector is the common generalisation.
    """
    merged = base.clone()
    for tensor, lambda_ in zip(tensors, lambdas, strict=True):
        merged += (tensor - base).mul_(lambda_)
    return merged


def ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Sequence[torch.Tensor | None] | None = None,
) -> torch.Tensor:
    """TIES-Merging, eq. 6 to 9 (arXiv:2306.01708): trim, elect signs, average those that agree, scale.

    Trimming is per tensor and keeps the `num_kept(k, n)` largest magnitudes, and all that equal the smallest of them:
    the result depends on no order. Signs are elected unweighted; where the trimmed task vectors cancel there is no
    elected sign and the base stays. `magnitudes` are the task vectors' sorted magnitudes where they are known.
    """
    known = magnitudes or (None,) * len(tensors)
    trimmed = [_trimmed(tensor - base, k, sorted_) for tensor, sorted_ in zip(tensors, known, strict=True)]
    elected = trimmed[0].clone()
    for tau in trimmed[1:]:
        elected += tau
    elected.sign_()  # eq. 7
    merged, count = torch.zeros_like(base), torch.zeros_like(base)
    for tau in trimmed:
        agreeing = tau.mul_(elected).clamp_(min=0)  # |tau| where its sign is the elected one, else 0
        merged += agreeing
        count += agreeing.sign_()
    merged.mul_(elected).div_(count.clamp_(min=1))  # eq. 8
    return merged.mul_(lambda_).add_(base)  # eq. 9


def slerp(first: torch.Tensor, second: torch.Tensor, *, t: float, cos: float | None = None) -> torch.Tensor:
    """Spherical interpolation, eq. 10 (Shoemake 1985), with omega the angle between the whole tensors, its cosine being
    `cos` where it is known; t = 0 is `first`. The tensors keep their norms: directions only decide the angle.

    Where |cos omega| > 0.9995 it is the straight line: sin omega, the divisor, goes to zero there, a float32 angle has
    lost its digits, two nearly equal tensors differ from the line by less than 1.3e-4, and between opposite tensors no
    great circle is the right one. A tensor without direction (norm at most 1e-8) is taken as orthogonal to the other.
    """
    if cos is None:
        cos = cosine(first, second)
    if abs(cos) > COLLINEAR:
        return _weighted_sum((first, second), (1 - t, t))
    omega = math.acos(cos)
    return _weighted_sum(
        (first, second), (math.sin((1 - t) * omega) / math.sin(omega), math.sin(t * omega) / math.sin(omega))
    )


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """The cosine of the angle between two tensors taken as vectors, in [-1, 1]; 0 where one has no direction."""
    norms = [math.sqrt(_dot(tensor, tensor)) for tensor in (first, second)]
    if min(norms) <= NO_DIRECTION:
        return 0.0
    return max(-1.0, min(1.0, _dot(first, second) / (norms[0] * norms[1])))


def num_kept(k: float, num_elements: int) -> int:
    """How many elements TIES keeps: floor(k n) in exact arithmetic on k's six decimals, at least one of any."""
    scale: int = 10**COEFFICIENT_DECIMALS
    return min(num_elements, max(1, round(k * scale) * num_elements // scale))


def merge_tensors(merge: Merge, operands: Operands) -> torch.Tensor:
    """Apply the merge's method. Raises InvalidRecipe for an unknown method or operands that do not fit it."""
    return METHODS[merge.method].merge(operands, merge)


def _trimmed(tau: torch.Tensor, k: float, magnitudes: torch.Tensor | None) -> torch.Tensor:
    """Eq. 6: `tau` with zeros for all but its largest magnitudes; modifies nothing."""
    rank = num_kept(k, tau.numel())
    if rank == tau.numel():
        return tau
    if magnitudes is None:
        smallest_kept = torch.kthvalue(tau.abs().flatten(), tau.numel() - rank + 1).values
    else:
        smallest_kept = magnitudes[-rank]
    if smallest_kept == 0:
        return tau
    # hardshrink keeps what is strictly larger than its bound.
    return torch.nn.functional.hardshrink(tau, float(smallest_kept.nextafter(torch.zeros(()))))


def _weighted_sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    merged = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        merged += tensor * weight
    return merged


def _dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """The inner product in float64, summed block by block: independent of the number of threads."""
    products = first.double().flatten() * second.double().flatten()
    whole = products.numel() // BLOCK * BLOCK
    blocks = products[:whole].view(-1, BLOCK).sum(dim=1).tolist()
    return math.fsum([*blocks, float(products[whole:].sum())])


def _base(operands: Operands, merge: Merge) -> torch.Tensor:
    assert operands.base is not None, f"{merge.method} was given no base"
    return operands.base


def _passthrough(operands: Operands, merge: Merge) -> torch.Tensor:
    """The one source as it is."""
    return operands.tensors[0]


def _linear(operands: Operands, merge: Merge) -> torch.Tensor:
    return linear(operands.tensors, merge.per_source("weight"))


def _task_arithmetic(operands: Operands, merge: Merge) -> torch.Tensor:
    return task_arithmetic(operands.tensors, _base(operands, merge), merge.per_source("lambda"))


def _ties(operands: Operands, merge: Merge) -> torch.Tensor:
    return ties(
        operands.tensors,
        _base(operands, merge),
        lambda_=merge.number("lambda"),
        k=merge.number("k"),
        magnitudes=operands.magnitudes,
    )


def _slerp(operands: Operands, merge: Merge) -> torch.Tensor:
    first, second = operands.tensors
    return slerp(first, second, t=merge.number("t"), cos=operands.cosine)


METHODS: Mapping[str, MergeMethod] = {
    method.name: method
    for method in (
        MergeMethod("passthrough", _passthrough, num_sources=1),
        MergeMethod("linear", _linear, ("weight",)),
        MergeMethod("task_arithmetic", _task_arithmetic, ("lambda",), needs_base=True),
        MergeMethod("ties", _ties, ("lambda", "k"), needs_base=True),
        MergeMethod("slerp", _slerp, ("t",), num_sources=2),
    )
}
