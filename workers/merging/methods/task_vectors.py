"""Task arithmetic and related methods, which sparsify task vectors, merge them by sign or weight, and add the base.

Equation numbers are those of "Automated Model Merging", section A.2, unless another source is named. `magnitudes` has a
table of |source - base| for each source, and `ranks` has the ranks of these magnitudes in their rows. Both are None if
they are not known. `orders` determine the order of elements of equal magnitude in each source.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TypeVar

import torch

from workers.merging.methods import consensus
from workers.merging.methods.peaks import Peak
from workers.merging.methods.registry import merges
from workers.merging.methods.scalars import fsum
from workers.merging.methods.sparsify import dropped, magnitude_sampled, masked_task_vectors, match_l1_norm, trimmed
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
    "m3_dare_ties",
    "m3_lambdas",
    "m3_ties",
    "m3_ties_majority",
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


@merges("task_arithmetic", peak=Peak(0, 8))
def task_arithmetic(tensors: Sequence[torch.Tensor], base: torch.Tensor, lambdas: Sequence[float]) -> torch.Tensor:
    """Task arithmetic (arXiv:2212.04089): the base plus each task vector times its own lambda.

    The result is theta_pre + sum_t lambda_t (theta_t - theta_pre). theta_pre is the base, theta_t is model t, and
    lambda_t is its number in `lambdas`. The method is defined by equations 4 and 5 of "Automated Model Merging";
    equation 5 has one lambda for all task vectors.
    """
    merged = base.clone()
    for tensor, lambda_ in zip(tensors, lambdas, strict=True):
        merged += (tensor - base).mul_(lambda_)
    return merged


@merges("ties", peak=Peak(4, 12))
def ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """TIES-Merging (arXiv:2306.01708): trim task vectors, elect signs, and average the elements with these signs.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The method is defined by
    equations 6 to 9 of "Automated Model Merging". Trimming keeps the `num_kept(k, n)` largest magnitudes of the n
    elements of a tensor. The elected sign of an element is the sign of the unweighted sum of the trimmed task vectors.
    Where this sum is zero there is no elected sign, and the result is the base. Elsewhere the result is the base plus
    lambda times the mean of the trimmed task vectors that have the elected sign.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_mean(taus).mul_(lambda_).add_(base)  # eq. 9


@merges("ties_majority", peak=Peak(4, 13))
def ties_majority(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
    majority: int | None = None,
) -> torch.Tensor:
    """TIES-Merging (`ties`) in which the majority sign is elected where the trimmed task vectors cancel each other.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The majority sign is the
    sign of `majority`; by default it is the sign elected for most elements of the tensor. Where the trimmed task
    vectors sum to zero, the task vectors that have the majority sign are averaged. The method is TIES as the program
    MergeLM computes it; "Automated Model Merging" and M3 (Mixup Model Merge) also use this form. k is the share of
    elements that trimming keeps. The merged task vector is multiplied by lambda and added to the base.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_majority_mean(taus, majority).mul_(lambda_).add_(base)


@merges("ties_sum", peak=Peak(4, 8))
def ties_sum(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """TIES-Merging (`ties`) in which the task vectors that have the elected sign are summed, not averaged.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. k is the share of elements
    that trimming keeps. For each element, the elected sign is the sign of the sum of the trimmed task vectors. The sum
    of those that have the elected sign is multiplied by lambda and added to the base. This method is TIES with the
    option "sum" in the code of the benchmark MergeBench.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_sum(taus).mul_(lambda_).add_(base)


@merges("ties_weighted", peak=Peak(4, 14))
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
    """TIES-Merging with weights in both the election of signs and the mean (mergekit's TIES).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `weights` and `densities`
    have a number for each model; a density is the share of elements that trimming keeps. For each element, the elected
    sign is the sign of the weighted sum of the trimmed task vectors, or positive where this sum is zero. Only task
    vectors that have the elected sign are added. With `normalize`, the weighted sum of the task vectors that have the
    elected sign is divided by the sum of the weights of these task vectors. The merged task vector is multiplied by
    lambda and added to the base. With `rescale`, trimmed task vectors are scaled to the L1 norm that they had before
    trimming.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, densities, magnitudes, orders, rescale=rescale)
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


merges("ties_weighted_l1", peak=Peak(8, 6))(partial(ties_weighted, rescale=True))


@merges("ties_peft", peak=Peak(4, 14))
def ties_peft(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    densities: Sequence[float],
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """TIES-Merging with weights in the mean, but not in the election of signs, as the library PEFT computes it.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `weights` and `densities`
    have a number for each model; a density is the share of elements that trimming keeps. For each element, the elected
    sign is the sign of the sum of the trimmed task vectors, or positive where this sum is zero. The weighted sum of the
    trimmed task vectors that have the elected sign is divided by the number of these task vectors, and added to the
    base. The evolutionary merge search GENOME uses this form of TIES.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, densities, magnitudes, orders)
    return consensus.disjoint_weighted_mean(taus, weights).add_(base)


@merges("m3_ties", peak=Peak(4, 29))
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
    """TIES-Merging that interpolates the elements which several task vectors keep (Mixup Model Merge, M3, appendix H).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. Trimming keeps the share k
    of each task vector's elements. The elected sign of an element is the sign of the sum of the trimmed task vectors,
    and elements with another sign are dropped. If several task vectors keep an element, it is interpolated with their
    weights. If only one task vector keeps the element, it is used without a weight. The result is multiplied by lambda
    and added to the base.

    The paper merges two models with weights w and 1 - w. With more models, the weights of the models that keep an
    element are divided by their sum. Where this sum is zero, the result is the base. Therefore the result is not
    continuous where the weights of all models that keep an element go to zero; the result of the function
    `m3_ties_majority` is continuous.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_interpolation(taus, weights).mul_(lambda_).add_(base)


@merges("m3_ties_majority", peak=Peak(4, 32))
def m3_ties_majority(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    lambda_: float,
    k: float,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
    majority: int | None = None,
) -> torch.Tensor:
    """TIES-Merging with an interpolation in place of the mean, as in the code of Mixup Model Merge (M3, appendix H).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. Trimming keeps the share k
    of each task vector's elements. The elected sign of an element is the sign of the sum of the trimmed task vectors.
    Where this sum is zero, the elected sign is the sign of `majority`; by default it is the sign elected for most
    elements of the tensor. The function `consensus.disjoint_majority_interpolation` interpolates the task vectors that
    have the elected sign. The result is multiplied by lambda and added to the base.

    The authors' code merges only two models, and gives the same result for them. With equal weights, the result is that
    of the function `ties_majority`.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    taus = trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders)
    return consensus.disjoint_majority_interpolation(taus, weights, majority).mul_(lambda_).add_(base)


@merges("m3_dare_ties", peak=Peak(4, 32))
def m3_dare_ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    lambda_: float,
    k: float,
    densities: Sequence[float],
    keys: Sequence[int],
    magnitudes: Magnitudes = None,
    orders: Orders = None,
    majority: int | None = None,
) -> torch.Tensor:
    """DARE, and after it TIES with the interpolation of Mixup Model Merge (M3, table 7), as in the authors' code.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. A random mask keeps the
    share density_t of the elements of task vector t. The kept elements are divided by density_t, and the other elements
    are set to zero. `keys` has the mask's key for each model. Then the function `m3_ties_majority` trims the task
    vectors, elects signs and interpolates, with the arguments `weights`, `lambda_`, `k`, `orders` and `majority`, whose
    meaning is described there. k is a share of all elements, including the elements that DARE has set to zero. With
    equal weights the result is the same as by DARE with TIES in MergeLM.

    `magnitudes` has, for each model, a precomputed table of the magnitudes of its task vector after the mask, from
    which trimming takes its threshold; None computes the threshold without a table.
    """
    taus = [
        trimmed(masked, k, order, known)
        for masked, order, known in zip(
            masked_task_vectors(tensors, base, densities, keys),
            each_order(orders, tensors),
            magnitudes or (None,) * len(tensors),
            strict=True,
        )
    ]
    return consensus.disjoint_majority_interpolation(taus, weights, majority).mul_(lambda_).add_(base)


@merges("dare_linear", peak=Peak(0, 10))
def dare_linear(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    keys: Sequence[int],
) -> torch.Tensor:
    """DARE with task arithmetic (arXiv:2311.03099): random elements of task vectors are dropped before the sum.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is theta_pre +
    sum_t lambda_t m_t tau_t / density_t. theta_pre is the base, and tau_t is the task vector of model t. m_t is a
    random mask that keeps the share density_t (the paper's 1 - p) of the elements. `lambdas`, `densities` and `keys`
    (the masks' keys) have a value for each model. With density 1 the method is task arithmetic.
    """
    merged = base.clone()
    for tensor, lambda_, density, key in zip(tensors, lambdas, densities, keys, strict=True):
        merged += dropped(tensor - base, density, key).mul_(lambda_ / density)
    return merged


@merges("dare_linear_l1", peak=Peak(0, 16))
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
    """DARE with task arithmetic, rescaled by L1 norms as in mergekit (dare_linear).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is the base
    plus sum_t lambda_t m_t tau_t, with tau_t the task vector of model t. m_t is a random mask that keeps the share
    density_t of the elements. `lambdas`, `densities` and `keys` (the masks' keys) have a value for each model. Unlike
    in the method `dare_linear`, kept elements are not divided by the density. If `rescale` is true, the kept elements
    are scaled to the L1 norm of the whole task vector. `norms` has, for each model, the precomputed L1 norm of its task
    vector; None computes the norms.
    """
    merged = base.clone()
    given = zip(densities, keys, _each(norms, tensors), strict=True)
    for tensor, lambda_, each in zip(tensors, lambdas, given, strict=True):
        merged += _dropped_l1(tensor - base, *each, rescale=rescale).mul_(lambda_)
    return merged


@merges("dare_ties", peak=Peak(4, 12))
def dare_ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    densities: Sequence[float],
    keys: Sequence[int],
) -> torch.Tensor:
    """TIES in which DARE's random dropping of elements replaces the trimming (arXiv:2311.03099).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The sparse task vectors
    are m_t tau_t / density_t. tau_t is the task vector of model t. m_t is a random mask that keeps the share density_t
    of the elements of tau_t. `densities` and `keys` (the masks' keys) have a value for each model. For each element,
    the sparse task vectors that have the sign of the sum of all sparse task vectors are averaged. The mean is
    multiplied by lambda and added to the base.
    """
    return consensus.disjoint_mean(masked_task_vectors(tensors, base, densities, keys)).mul_(lambda_).add_(base)


@merges("dare_ties_l1", peak=Peak(4, 13))
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
    """Weighted TIES of task vectors after DARE's random dropping of elements (mergekit's dare_ties).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. DARE keeps elements of
    each task vector at random. `densities` has, for each model, the share that is kept, and `keys` has the key of the
    random mask. With `rescale`, the kept elements are scaled to the L1 norm of the whole task vector. `norms` has this
    norm for each model; None computes the norms. Then, for each element, the task vectors that have the sign of their
    weighted sum are averaged with `weights`. The mean is multiplied by lambda and added to the base. Without
    `normalize`, a weighted sum is used in place of the mean.
    """
    taus = [
        _dropped_l1(tensor - base, density, key, norm, rescale=rescale)
        for tensor, density, key, norm in zip(tensors, densities, keys, _each(norms, tensors), strict=True)
    ]
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


@merges("m3_dare", peak=Peak(0, 10))
def m3_dare(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    lambda_: float,
    densities: Sequence[float],
    keys: Sequence[int],
) -> torch.Tensor:
    """Mixup Model Merge (M3, section 4.4) of task vectors whose elements DARE has dropped at random.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is theta_pre +
    lambda sum_t w_t m_t tau_t / density_t. theta_pre is the base, and tau_t is the task vector of model t. m_t is a
    random mask that keeps the share density_t of the elements of tau_t. `weights`, `densities` and `keys` (the masks'
    keys) have a value for each model. The weights w_t are divided by their sum, so that direction and magnitude are set
    separately. The method equals the method `dare_linear` with lambda_t = lambda w_t.
    """
    return dare_linear(tensors, base, lambdas=m3_lambdas(weights, lambda_), densities=densities, keys=keys)


def m3_lambdas(weights: Sequence[float], lambda_: float) -> list[float]:
    """The lambda of each model with which the method `dare_linear` gives the same result as the method `m3_dare`.

    A model's lambda is `lambda_` times the model's number in `weights`, divided by the sum of the weights.
    """
    total = fsum(weights)
    return [lambda_ * weight / total for weight in weights]


@merges("della", peak=Peak(4, 21))
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
    """DELLA (arXiv:2406.11617): TIES with MagPrune (random dropping by magnitude) in place of trimming.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. MagPrune (function
    `sparsify.magnitude_sampled`) drops elements at random; it drops smaller elements more often, and divides each kept
    element by the probability of keeping it. This probability is from density - epsilon to density + epsilon. For each
    element, the sparse task vectors that have the sign of the sum of all sparse task vectors are averaged. The mean is
    multiplied by lambda and added to the base.

    `densities`, `epsilons` and `keys` (the keys of the random masks) have a value for each model. `ranks` has, for each
    model, the precomputed rank of each magnitude in its row; None computes the ranks. `orders` has, for each model, the
    rule that breaks ties between elements of equal magnitude.
    """
    taus = [
        magnitude_sampled(tensor - base, density, epsilon, key, order, ranks=known)
        for tensor, density, epsilon, key, order, known in zip(
            tensors, densities, epsilons, keys, each_order(orders, tensors), _each(ranks, tensors), strict=True
        )
    ]
    return consensus.disjoint_mean(taus).mul_(lambda_).add_(base)


@merges("della_l1", peak=Peak(4, 20))
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
    """Weighted TIES of task vectors after MagPrune's random dropping of elements (mergekit's della).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. MagPrune (function
    `sparsify.magnitude_sampled`) keeps each element with a probability from density - epsilon to density + epsilon, by
    the rank of its magnitude in its row. With `rescale`, the kept elements of a task vector are scaled to the L1 norm
    of the whole task vector. Then, for each element, the task vectors that have the sign of their weighted sum are
    averaged with `weights`. The mean is multiplied by lambda and added to the base. Without `normalize`, a weighted sum
    is used in place of the mean.

    `densities`, `epsilons` and `keys` (the keys of the random masks) have a value for each model. `ranks` has, for each
    model, the precomputed rank of each magnitude in its row; None computes the ranks. `orders` has, for each model, the
    rule that breaks ties between elements of equal magnitude.
    """
    taus = [
        _sampled_l1(tensor - base, density, epsilon, key, order, known, rescale=rescale)
        for tensor, density, epsilon, key, order, known in zip(
            tensors, densities, epsilons, keys, each_order(orders, tensors), _each(ranks, tensors), strict=True
        )
    ]
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


@merges("della_linear", peak=Peak(0, 29))
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
    """DELLA (arXiv:2406.11617) without the election of signs: task arithmetic after MagPrune's random dropping.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is theta_pre +
    sum_t lambda_t MagPrune(tau_t). theta_pre is the base, and tau_t is the task vector of model t. MagPrune (function
    `sparsify.magnitude_sampled`) keeps each element with a probability from density - epsilon to density + epsilon, and
    divides each kept element by this probability. Larger elements have a higher probability.

    `lambdas`, `densities`, `epsilons` and `keys` (the keys of the random masks) have a value for each model. `ranks`
    has, for each model, the precomputed rank of each magnitude in its row; None computes the ranks. `orders` has, for
    each model, the rule that breaks ties between elements of equal magnitude.
    """
    merged = base.clone()
    given = zip(densities, epsilons, keys, each_order(orders, tensors), strict=True)
    for tensor, lambda_, each, known in zip(tensors, lambdas, given, _each(ranks, tensors), strict=True):
        merged += magnitude_sampled(tensor - base, *each, ranks=known).mul_(lambda_)
    return merged


@merges("della_linear_l1", peak=Peak(0, 28))
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
    """Task arithmetic after MagPrune's random dropping of elements (mergekit's della_linear).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is the base
    plus sum_t lambda_t tau_t. tau_t has the elements of the task vector of model t that MagPrune (function
    `sparsify.magnitude_sampled`) keeps. MagPrune keeps each element with a probability from density - epsilon to
    density + epsilon, higher for larger elements. With `rescale`, tau_t is scaled to the L1 norm of the whole task
    vector.

    `lambdas`, `densities`, `epsilons` and `keys` (the keys of the random masks) have a value for each model. `ranks`
    has, for each model, the precomputed rank of each magnitude in its row; None computes the ranks. `orders` has, for
    each model, the rule that breaks ties between elements of equal magnitude.
    """
    merged = base.clone()
    given = zip(densities, epsilons, keys, each_order(orders, tensors), strict=True)
    for tensor, lambda_, each, known in zip(tensors, lambdas, given, _each(ranks, tensors), strict=True):
        merged += _sampled_l1(tensor - base, *each, known, rescale=rescale).mul_(lambda_)
    return merged


@merges("breadcrumbs", peak=Peak(4, 11))
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
    """Model Breadcrumbs (arXiv:2312.06795): task arithmetic without the largest and smallest elements of task vectors.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is the base
    plus, for each model t, lambda_t times the sparse task vector of the model. It is the task vector with the largest
    elements (in magnitude), the share gamma_t, set to zero, and with so many of the smallest elements set to zero that
    the share density_t is left (function `sparsify.cut_both_ends`). With `rescale`, the remaining elements of a task
    vector are scaled to the L1 norm of the whole task vector, as in mergekit.

    `lambdas`, `densities` and `gammas` have a number for each model; the paper uses one lambda for all models.
    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which thresholds are
    taken; None computes the thresholds without a table. `orders` has, for each model, the rule that breaks ties between
    elements of equal magnitude.
    """
    merged = base.clone()
    crumbs = trimmed_breadcrumbs(tensors, base, densities, gammas, magnitudes, orders, rescale=rescale)
    for tau, lambda_ in zip(crumbs, lambdas, strict=True):
        merged += tau.mul_(lambda_)
    return merged


merges("breadcrumbs_l1", peak=Peak(8, 8))(partial(breadcrumbs, rescale=True))


@merges("breadcrumbs_ties", peak=Peak(4, 14))
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
    """Weighted TIES of task vectors without their largest and smallest elements (mergekit's breadcrumbs_ties).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The largest elements (the
    share gamma) and the smallest elements of each task vector are set to zero, so that the share density is left.
    `densities` and `gammas` have these shares for each model. With `rescale`, the remaining elements are scaled to the
    L1 norm of the whole task vector. Then, for each element, the task vectors that have the sign of their weighted sum
    are averaged with `weights`. The mean is multiplied by lambda and added to the base. Without `normalize`, a weighted
    sum is used in place of the mean.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which thresholds are
    taken; None computes the thresholds without a table. `orders` has, for each model, the rule that breaks ties between
    elements of equal magnitude.
    """
    taus = trimmed_breadcrumbs(tensors, base, densities, gammas, magnitudes, orders, rescale=rescale)
    return consensus.disjoint_weighted(taus, weights, normalize=normalize).mul_(lambda_).add_(base)


merges("breadcrumbs_ties_l1", peak=Peak(8, 5))(partial(breadcrumbs_ties, rescale=True))


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
