"""Task arithmetic and related methods: task vectors are sparsified, merged by sign or weight, and added to the base.

Equation numbers are those of "Automated Model Merging", section A.2, unless another source is named. `magnitudes` are
the tables of |source - base|, one per source, and `ranks` the ranks of these magnitudes in their rows, if known.
`orders` say how elements of equal magnitude are ordered in each source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch

from workers.merging.methods import consensus
from workers.merging.methods.registry import merges
from workers.merging.methods.scalars import fsum
from workers.merging.methods.sparsify import dropped, magnitude_sampled, match_l1_norm
from workers.merging.methods.trimming import Magnitudes, Orders, each_order, trimmed_breadcrumbs, trimmed_task_vectors
from workers.merging.order_statistics import TieOrder

__all__ = [
    "breadcrumbs",
    "breadcrumbs_ties",
    "dare_linear",
    "dare_linear_l1",
    "dare_ties",
    "dare_ties_l1",
    "della",
    "della_l1",
    "della_linear",
    "della_linear_l1",
    "m3_dare",
    "m3_lambdas",
    "m3_ties",
    "task_arithmetic",
    "ties",
    "ties_majority",
    "ties_peft",
    "ties_sum",
    "ties_weighted",
]

T = TypeVar("T")
Ranks = Sequence[torch.Tensor] | None
Norms = Sequence[float] | None


@merges("task_arithmetic")
def task_arithmetic(tensors: Sequence[torch.Tensor], base: torch.Tensor, lambdas: Sequence[float]) -> torch.Tensor:
    """Task arithmetic, eq. 4 and 5 (arXiv:2212.04089): theta_pre + sum_t lambda_t (theta_t - theta_pre).

    Eq. 5 has one lambda for all task vectors; one per task vector is the common generalisation.
    """
    merged = base.clone()
    for tensor, lambda_ in zip(tensors, lambdas, strict=True):
        merged += (tensor - base).mul_(lambda_)
    return merged


@merges("ties")
def ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """TIES-Merging, eq. 6 to 9 (arXiv:2306.01708): trim, elect signs, average those that agree, scale.

    Trimming is per tensor and keeps the `num_kept(k, n)` largest magnitudes. Signs are elected unweighted; where the
    trimmed task vectors cancel there is no elected sign and the result is the base.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_mean(taus).mul_(lambda_).add_(base)  # eq. 9


@merges("ties_majority")
def ties_majority(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`ties`, but where trimmed task vectors cancel, the sign is that of the tensor's majority of signs (MergeLM).

    There the elements with that sign are kept. "Automated Model Merging" and M3 build on this form.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_majority_mean(taus).mul_(lambda_).add_(base)


@merges("ties_sum")
def ties_sum(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`ties`, but the task vectors that agree are added, not averaged (MergeBench, "sum")."""
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_sum(taus).mul_(lambda_).add_(base)


@merges("ties_weighted")
def ties_weighted(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    lambda_: float,
    normalize: bool,
    rescale: bool = False,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`ties` with weights, which count in the election of signs and in the mean (mergekit's TIES).

    Where the weighted sum is zero, the positive sign is elected. The mean is divided by the weights of those that
    agree, unless `normalize` is 0. With `rescale`, trimmed task vectors are scaled to their sum of magnitudes before
    trimming.
    """
    taus = trimmed_task_vectors(tensors, base, densities, magnitudes, orders, rescale=rescale)
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


merges("ties_weighted_l1")(partial(ties_weighted, rescale=True))


@merges("ties_peft")
def ties_peft(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`ties` with weights that do not count in the election of signs (PEFT, GENOME).

    Where the sum is zero, the positive sign is elected. The result is the weighted sum of those that agree, divided by
    their number.
    """
    taus = trimmed_task_vectors(tensors, base, densities, magnitudes, orders)
    return consensus.disjoint_weighted_mean(taus, weights).add_(base)


@merges("m3_ties")
def m3_ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """Mixup Model Merge inside TIES (M3, appendix H): interpolation of what several task vectors keep.

    Trimming and signs are those of `ties`. A parameter that several task vectors keep is interpolated with their
    weights; one that a single task vector keeps is kept as it is. The result is multiplied by lambda.

    The paper has two models with weights w and 1 - w; with more, the weights of those that keep the parameter are
    divided by their sum. Where that is zero the base stays.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_interpolation(taus, weights).mul_(lambda_).add_(base)


@merges("dare_linear")
def dare_linear(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    keys: Sequence[int],
) -> torch.Tensor:
    """DARE with task arithmetic (arXiv:2311.03099): theta_pre + sum_t lambda_t m_t tau_t / density_t.

    m_t is a random mask that keeps the share density_t (the paper's 1 - p). Density 1 is task arithmetic.
    """
    merged = base.clone()
    for tensor, lambda_, density, key in zip(tensors, lambdas, densities, keys, strict=True):
        merged += dropped(tensor - base, density, key).mul_(lambda_ / density)
    return merged


@merges("dare_linear_l1")
def dare_linear_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    keys: Sequence[int],
    rescale: bool = True,
    norms: Norms = None,
) -> torch.Tensor:
    """`dare_linear`, but the elements kept are scaled to the sum of magnitudes of the whole task vector (mergekit)."""
    merged = base.clone()
    given = zip(densities, keys, _each(norms, tensors), strict=True)
    for tensor, lambda_, each in zip(tensors, lambdas, given, strict=True):
        merged += _dropped_l1(tensor - base, *each, rescale=rescale).mul_(lambda_)
    return merged


@merges("dare_ties")
def dare_ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    densities: Sequence[float],
    keys: Sequence[int],
) -> torch.Tensor:
    """DARE instead of TIES' trimming (arXiv:2311.03099): signs are elected among m_t tau_t / density_t.

    Signs, mean and lambda are as in `ties`.
    """
    taus = [
        dropped(tensor - base, density, key).mul_(1 / density)
        for tensor, density, key in zip(tensors, densities, keys, strict=True)
    ]
    return consensus.disjoint_mean(taus).mul_(lambda_).add_(base)


@merges("dare_ties_l1")
def dare_ties_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    lambda_: float,
    normalize: bool,
    keys: Sequence[int],
    rescale: bool = True,
    norms: Norms = None,
) -> torch.Tensor:
    """DARE, scaled to the task vectors' sums of magnitudes, merged as in `ties_weighted` (mergekit's dare_ties)."""
    taus = [
        _dropped_l1(tensor - base, density, key, norm, rescale=rescale)
        for tensor, density, key, norm in zip(tensors, densities, keys, _each(norms, tensors), strict=True)
    ]
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


@merges("m3_dare")
def m3_dare(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    lambda_: float,
    densities: Sequence[float],
    keys: Sequence[int],
) -> torch.Tensor:
    """Mixup Model Merge on DARE's task vectors (M3, section 4.4).

    It is theta_pre + lambda sum_t w_t m_t tau_t / density_t, with the weights divided by their sum, so that direction
    and magnitude are set separately. It is `dare_linear` with lambda_t = lambda w_t.
    """
    return dare_linear(tensors, base, lambdas=m3_lambdas(weights, lambda_), densities=densities, keys=keys)


def m3_lambdas(weights: Sequence[float], lambda_: float) -> list[float]:
    """The lambdas with which `dare_linear` computes `m3_dare`."""
    total = fsum(weights)
    return [lambda_ * weight / total for weight in weights]


@merges("della")
def della(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    densities: Sequence[float],
    epsilons: Sequence[float],
    keys: Sequence[int],
    ranks: Ranks = None,
    orders: Orders = None,
) -> torch.Tensor:
    """DELLA (arXiv:2406.11617): MagPrune instead of TIES' trimming.

    MagPrune (`sparsify.magnitude_sampled`) divides each kept element by its probability. Signs, mean and lambda are as
    in `ties`.
    """
    taus = [
        magnitude_sampled(tensor - base, density, epsilon, key, order, ranks=known)
        for tensor, density, epsilon, key, order, known in zip(
            tensors, densities, epsilons, keys, each_order(orders, tensors), _each(ranks, tensors), strict=True
        )
    ]
    return consensus.disjoint_mean(taus).mul_(lambda_).add_(base)


@merges("della_l1")
def della_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    epsilons: Sequence[float],
    lambda_: float,
    normalize: bool,
    keys: Sequence[int],
    rescale: bool = True,
    ranks: Ranks = None,
    orders: Orders = None,
) -> torch.Tensor:
    """MagPrune, scaled to the task vectors' sums of magnitudes, merged as in `ties_weighted` (mergekit's della).

    Its probabilities are symmetric.
    """
    taus = [
        _sampled_l1(tensor - base, density, epsilon, key, order, known, rescale=rescale)
        for tensor, density, epsilon, key, order, known in zip(
            tensors, densities, epsilons, keys, each_order(orders, tensors), _each(ranks, tensors), strict=True
        )
    ]
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


@merges("della_linear")
def della_linear(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    epsilons: Sequence[float],
    keys: Sequence[int],
    ranks: Ranks = None,
    orders: Orders = None,
) -> torch.Tensor:
    """DELLA without the election of signs (arXiv:2406.11617): theta_pre + sum_t lambda_t MagPrune(tau_t)."""
    merged = base.clone()
    given = zip(densities, epsilons, keys, each_order(orders, tensors), strict=True)
    for tensor, lambda_, each, known in zip(tensors, lambdas, given, _each(ranks, tensors), strict=True):
        merged += magnitude_sampled(tensor - base, *each, ranks=known).mul_(lambda_)
    return merged


@merges("della_linear_l1")
def della_linear_l1(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    epsilons: Sequence[float],
    keys: Sequence[int],
    rescale: bool = True,
    ranks: Ranks = None,
    orders: Orders = None,
) -> torch.Tensor:
    """`della_linear` with the probabilities and the rescaling of `della_l1` (mergekit's della_linear)."""
    merged = base.clone()
    given = zip(densities, epsilons, keys, each_order(orders, tensors), strict=True)
    for tensor, lambda_, each, known in zip(tensors, lambdas, given, _each(ranks, tensors), strict=True):
        merged += _sampled_l1(tensor - base, *each, known, rescale=rescale).mul_(lambda_)
    return merged


@merges("breadcrumbs")
def breadcrumbs(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    gammas: Sequence[float],
    rescale: bool = False,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """Model Breadcrumbs (arXiv:2312.06795): task arithmetic without the largest and the smallest elements.

    It is theta_pre + sum_t lambda_t times the task vectors without their largest (share gamma) and smallest elements
    (`sparsify.cut_both_ends`). The paper has one lambda. With `rescale`, these are scaled to the sum of magnitudes of
    the whole task vector (mergekit).
    """
    merged = base.clone()
    crumbs = trimmed_breadcrumbs(tensors, base, densities, gammas, magnitudes, orders, rescale=rescale)
    for tau, lambda_ in zip(crumbs, lambdas, strict=True):
        merged += tau.mul_(lambda_)
    return merged


merges("breadcrumbs_l1")(partial(breadcrumbs, rescale=True))


@merges("breadcrumbs_ties")
def breadcrumbs_ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    gammas: Sequence[float],
    lambda_: float,
    normalize: bool,
    rescale: bool = False,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """Model Breadcrumbs' selection of elements, then the merge of `ties_weighted` (mergekit's breadcrumbs_ties).

    `rescale` is that of `ties_weighted`.
    """
    taus = trimmed_breadcrumbs(tensors, base, densities, gammas, magnitudes, orders, rescale=rescale)
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


merges("breadcrumbs_ties_l1")(partial(breadcrumbs_ties, rescale=True))


def _dropped_l1(tau: torch.Tensor, density: float, key: int, norm: float | None, *, rescale: bool) -> torch.Tensor:
    return match_l1_norm(dropped(tau.clone(), density, key), tau, norm) if rescale else dropped(tau, density, key)


def _sampled_l1(
    tau: torch.Tensor,
    density: float,
    epsilon: float,
    key: int,
    order: TieOrder,
    ranks: torch.Tensor | None,
    *,
    rescale: bool,
) -> torch.Tensor:
    sampled = magnitude_sampled(
        tau.clone(), density, epsilon, key, order, is_symmetric=True, rescale=False, ranks=ranks
    )
    return match_l1_norm(sampled, tau) if rescale else sampled


def _each(known: Sequence[T] | None, tensors: Sequence[torch.Tensor]) -> Sequence[T | None]:
    return known if known is not None else [None] * len(tensors)
