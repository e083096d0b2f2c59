"""Merging of task vectors by elected signs, as in TIES and its variants.

The functions take task vectors, one per source, and return the merged task vector; they may modify their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workers.merging.methods.scalars import fsum

__all__ = [
    "disjoint_interpolation",
    "disjoint_majority_interpolation",
    "disjoint_majority_mean",
    "disjoint_mean",
    "disjoint_sum",
    "disjoint_weighted",
    "disjoint_weighted_mean",
    "elected_balance",
]


def disjoint_mean(taus: Sequence[torch.Tensor]) -> torch.Tensor:
    """The element-wise mean of the task vectors that have the elected sign (TIES).

    The elected sign is the sign of the sum of all task vectors `taus`. Where this sum is zero, the result is zero. The
    function computes equations 7 and 8 of "Automated Model Merging", which are also the equations of TIES
    (arXiv:2306.01708).
    """
    return _mean_of_agreeing(taus, _sum(taus).sign_())


def elected_balance(taus: Sequence[torch.Tensor]) -> int:
    """The number of positive elements in the sum of the task vectors `taus`, minus the number of negative elements.

    The sign of the result is the majority sign: the sign that most elements of the sum have. Some methods use it for
    elements whose sum is zero.
    """
    summed = _sum(taus)
    return int((summed > 0).sum()) - int((summed < 0).sum())


def disjoint_majority_mean(taus: Sequence[torch.Tensor], majority: int | None = None) -> torch.Tensor:
    """The element-wise mean of the task vectors that have the elected sign (TIES as the program MergeLM computes it).

    Each element has an elected sign: the sign of the sum of all task vectors `taus` there. Where this sum is zero, the
    majority sign is elected: the sign of `majority` or, if `majority` is None, the sign that the sum has in most
    elements. MergeLM is the code of DARE's authors.
    """
    return _mean_of_agreeing(taus, _elected_or_majority(taus, majority))


def disjoint_sum(taus: Sequence[torch.Tensor]) -> torch.Tensor:
    """The element-wise sum of the task vectors that have the elected sign, as in TIES of the benchmark MergeBench.

    The elected sign is the sign of the sum of all task vectors `taus`. Where this sum is zero, the result is zero.
    """
    elected = _sum(taus).sign_()
    merged = torch.zeros_like(elected)
    for tau in taus:
        merged += tau.mul_(elected).clamp_(min=0)
    return merged.mul_(elected)


def disjoint_weighted(taus: Sequence[torch.Tensor], weights: Sequence[float], *, normalize: bool) -> torch.Tensor:
    """The element-wise weighted sum of the task vectors that have the elected sign, as mergekit computes it for TIES.

    `taus` are the task vectors. The elected sign is the sign of the weighted sum of all task vectors; it is positive if
    this sum is zero. With `normalize`, the result is divided by the sum of the weights of the task vectors that have
    the elected sign. The result is not divided if these weights sum to zero.
    """
    taus = [tau.mul_(weight) for tau, weight in zip(taus, weights, strict=True)]
    is_positive = _sum(taus) >= 0
    merged = torch.zeros_like(taus[0])
    divisor = torch.zeros_like(taus[0])
    for tau, weight in zip(taus, weights, strict=True):
        agrees = torch.where(is_positive, tau > 0, tau < 0)
        merged += tau.masked_fill_(~agrees, 0)
        if normalize:
            divisor += agrees.to(tau.dtype).mul_(weight)
    return merged.div_(divisor.masked_fill_(divisor == 0, 1)) if normalize else merged


def disjoint_weighted_mean(taus: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The element-wise weighted mean of the task vectors that have the elected sign, as PEFT computes it for TIES.

    The elected sign is the sign of the unweighted sum of all task vectors `taus`; it is positive if this sum is zero.
    The result is the sum of the task vectors that have the elected sign, times their `weights`, divided by the number
    of these task vectors.
    """
    is_positive = _sum(taus) >= 0
    merged = torch.zeros_like(taus[0])
    count = torch.zeros_like(taus[0])
    for tau, weight in zip(taus, weights, strict=True):
        agrees = torch.where(is_positive, tau > 0, tau < 0)
        count += agrees
        merged += tau.masked_fill_(~agrees, 0).mul_(weight)
    return merged.div_(count.clamp_(min=1))


def disjoint_interpolation(taus: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The element-wise weighted mean of the task vectors that have the elected sign (Mixup Model Merge, M3).

    The elected sign is the sign of the sum of all task vectors `taus`. Where this sum is zero, the result is zero.
    `weights` has one weight for each task vector. The weights are divided by the sum of the weights of the task vectors
    that have the elected sign. If only one task vector has the elected sign, the result is this task vector. M3
    describes the interpolation in appendix H.
    """
    elected = _sum(taus).sign_()
    alone, mixed = torch.zeros_like(elected), torch.zeros_like(elected)
    count, divisor = torch.zeros_like(elected), torch.zeros_like(elected)
    for tau, weight in zip(taus, weights, strict=True):
        agreeing = tau.mul_(elected).clamp_(min=0)
        alone += agreeing
        mixed += agreeing * weight
        agrees = agreeing.sign()  # a copy: the product above needs `agreeing` for its gradient
        count += agrees
        divisor += agrees.mul_(weight)
    mixed.div_(divisor.masked_fill_(divisor == 0, 1))
    return torch.where(count > 1, mixed, alone).mul_(elected)


def disjoint_majority_interpolation(
    taus: Sequence[torch.Tensor], weights: Sequence[float], majority: int | None = None
) -> torch.Tensor:
    """The element-wise interpolation of the task vectors that have the elected sign (code of Mixup Model Merge, M3).

    The elected sign is the sign of the sum of all task vectors `taus`. If this sum is zero, the elected sign is the
    sign of `majority` or, if `majority` is None, the sign that most elements of the sum have. The share of a task
    vector is its weight divided by the sum of all weights. The shares of the task vectors that do not have the elected
    sign are divided equally among the task vectors that have it. If only one task vector has the elected sign, the
    result is this task vector. The result is continuous in `weights`. Equal weights give the mean. M3 describes the
    interpolation in appendix H.
    """
    elected = _elected_or_majority(taus, majority)
    shares = [weight / fsum(weights) for weight in weights]
    merged, added = torch.zeros_like(elected), torch.zeros_like(elected)
    count, left = torch.zeros_like(elected), torch.ones_like(elected)
    for tau, share in zip(taus, shares, strict=True):
        agreeing = tau.mul_(elected).clamp_(min=0)
        merged += agreeing * share
        added += agreeing
        agrees = agreeing.sign()
        count += agrees
        left = left - agrees * share
    return (merged + added * (left / count.clamp_(min=1))).mul_(elected)


def _elected_or_majority(taus: Sequence[torch.Tensor], majority: int | None) -> torch.Tensor:
    elected = _sum(taus).sign_()
    balance = int((elected > 0).sum()) - int((elected < 0).sum()) if majority is None else majority
    return elected.masked_fill_(elected == 0, float((balance > 0) - (balance < 0)))


def _sum(taus: Sequence[torch.Tensor]) -> torch.Tensor:
    summed = taus[0].clone()
    for tau in taus[1:]:
        summed += tau
    return summed


def _mean_of_agreeing(taus: Sequence[torch.Tensor], elected: torch.Tensor) -> torch.Tensor:
    merged, count = torch.zeros_like(elected), torch.zeros_like(elected)
    for tau in taus:
        agreeing = tau.mul_(elected).clamp_(min=0)  # |tau| where its sign is the elected one, else 0
        merged += agreeing
        count += agreeing.sign_()
    return merged.mul_(elected).div_(count.clamp_(min=1))
