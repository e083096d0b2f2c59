"""Spherical means of several models: Multi-SLERP and the Karcher mean.

Both are weighted sums of the models. The factors of the models follow from the inner products of the models alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from search_spaces.errors import InvalidRecipe
from workers.merging.methods import scalars
from workers.merging.methods.arithmetic import Products, inner_products, weighted_sum
from workers.merging.methods.averages import shares_of
from workers.merging.methods.peaks import Peak
from workers.merging.methods.registry import merges

__all__ = [
    "karcher",
    "karcher_weights",
    "multislerp",
    "multislerp_task_vectors",
    "multislerp_unscaled",
    "multislerp_unscaled_task_vectors",
    "multislerp_weights",
]

# Multi-SLERP's epsilon, which is added to the norms that it divides by.
MULTISLERP_EPSILON = 1e-8
# A shorter weighted mean of directions has no direction: lengths from inner products have an error of about 1e-8.
NO_MEAN = 1e-7
# The Karcher mean takes at most this many steps, none of them shorter than the tolerance.
KARCHER_STEPS, KARCHER_TOLERANCE = 10, 1e-5
# Angles from inner products have an error of about 1e-8.
SMALLEST_ANGLE = 1e-7


@merges("multislerp", peak=Peak(0, 8))
def multislerp(
    tensors: Sequence[torch.Tensor],
    *,
    weights: Sequence[float],
    eps: float = MULTISLERP_EPSILON,
    products: Products | None = None,
) -> torch.Tensor:
    """Barycentric interpolation on the hypersphere (mergekit's Multi-SLERP, goddard.blog/posts/multislerp).

    theta_t are the tensors, and w_t are their weights divided by the sum of the weights. u_t = theta_t / |theta_t| are
    the directions, and m = sum_t w_t u_t / |sum_t w_t u_t| is their mean. The result is m * sum_t w_t |theta_t|, the
    mean direction times the mean norm. mergekit also rotates m by the mean tangent vector v = sum_t w_t (u_t - <u_t, m>
    m). This step is left out here, because v is zero except for rounding: sum_t w_t u_t has the direction of m.

    If sum_t w_t u_t is shorter than 1e-7 or `eps`, there is no mean direction. Two tensors are then interpolated
    linearly; for more tensors InvalidRecipe is raised. `eps` is also added to the norms, as in mergekit. A single
    tensor is returned unchanged. `products` are the precomputed inner products of the tensors; None computes them.
    """
    if len(tensors) == 1:
        return tensors[0]
    return weighted_sum(tensors, multislerp_weights(weights, products or inner_products(tensors), eps=eps))


@merges("multislerp_unscaled", peak=Peak(0, 8))
def multislerp_unscaled(
    tensors: Sequence[torch.Tensor],
    *,
    weights: Sequence[float],
    eps: float = MULTISLERP_EPSILON,
    products: Products | None = None,
) -> torch.Tensor:
    """Multi-SLERP (`multislerp`) with weights used as given (mergekit: `normalize_weights: false`).

    The mean direction is the same as in the method `multislerp`, because it does not depend on the sum of the weights.
    The length of the result is the sum of the tensors' norms times their weights, which need not sum to one. `eps` is a
    small number that is added to norms. `products` are the precomputed inner products of the tensors; None computes
    them.
    """
    if len(tensors) == 1:
        return tensors[0]
    known = products or inner_products(tensors)
    return weighted_sum(tensors, multislerp_weights(weights, known, eps=eps, normalize=False))


def multislerp_weights(
    weights: Sequence[float], products: Products, *, eps: float = MULTISLERP_EPSILON, normalize: bool = True
) -> list[float]:
    """The factor of each tensor in Multi-SLERP, which interpolates directions on the sphere.

    The factors are for the function `multislerp` or, without `normalize`, for the function `multislerp_unscaled`.
    `weights` are the weights of the tensors, and `products` are the inner products of all pairs of tensors. `eps` is a
    small number that is added to norms. Raises InvalidRecipe if the directions of more than two tensors cancel each
    other.
    """
    if len(products) == 1:
        return [1.0]
    shares, norms = shares_of("multislerp", weights) if normalize else [*weights], _norms(products)
    units = [share / (size + eps) if size + eps else 0.0 for share, size in zip(shares, norms, strict=True)]
    size = _length(units, products)
    if size < max(NO_MEAN, eps):
        counting = [norm for norm, share in zip(norms, shares, strict=True) if share != 0]
        if len(counting) <= 2 or max(counting) == 0:
            return shares
        raise InvalidRecipe(
            f"multislerp: the directions of {len(counting)} tensors cancel with weights {tuple(weights)}: there is no "
            "mean direction; use other weights or another method"
        )
    length = scalars.fsum(share * size for share, size in zip(shares, norms, strict=True))
    # With longer units the tangent vectors would not add up to zero; mergekit adds eps to their length, too.
    return [unit * length / size * math.cos(eps) for unit in units]


@merges("multislerp_task_vectors", peak=Peak(4, 8))
def multislerp_task_vectors(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    eps: float = MULTISLERP_EPSILON,
    products: Products | None = None,
) -> torch.Tensor:
    """The base plus Multi-SLERP (`multislerp`) of the task vectors (mergekit's Multi-SLERP with a base model).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `weights` has the weight
    of each task vector, and `eps` is a small number that is added to norms. `products` are the precomputed inner
    products of the task vectors; None computes them.
    """
    if len(tensors) == 1:
        return tensors[0]
    return multislerp([tensor - base for tensor in tensors], weights=weights, eps=eps, products=products).add_(base)


@merges("multislerp_unscaled_task_vectors", peak=Peak(4, 8))
def multislerp_unscaled_task_vectors(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    eps: float = MULTISLERP_EPSILON,
    products: Products | None = None,
) -> torch.Tensor:
    """The base plus Multi-SLERP of the task vectors, with weights that need not sum to one (`multislerp_unscaled`).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `eps` is a small number
    that is added to norms. `products` are the precomputed inner products of the task vectors; None computes them. In
    mergekit this method is Multi-SLERP with a base model and `normalize_weights: false`.
    """
    if len(tensors) == 1:
        return tensors[0]
    taus = [tensor - base for tensor in tensors]
    return multislerp_unscaled(taus, weights=weights, eps=eps, products=products).add_(base)


@merges("karcher", peak=Peak(0, 8))
def karcher(
    tensors: Sequence[torch.Tensor],
    *,
    weights: Sequence[float],
    max_iter: int = KARCHER_STEPS,
    tol: float = KARCHER_TOLERANCE,
    products: Products | None = None,
) -> torch.Tensor:
    """The Karcher (Riemannian) mean of the tensors' directions on the unit sphere, times the mean norm of the tensors.

    u_t are the directions of the tensors, and w_t are the weights. The mean direction is the m with sum_t w_t
    log_m(u_t) = 0, where exp_m and log_m map between the sphere and its tangent space at m. The mean direction is found
    by iteration: m begins as the normalised mean, and each step replaces it by exp_m(sum_t w_t log_m(u_t)). The
    iteration ends after `max_iter` steps, or before a step shorter than `tol`. Tensors with a norm of at most `tol` are
    included in the mean norm, but not in the direction. A single tensor is returned unchanged. `products` are the
    precomputed inner products of the tensors; None computes them. The paper is arXiv:2603.04972; it uses equal weights.
    """
    if len(tensors) == 1:
        return tensors[0]
    return weighted_sum(
        tensors, karcher_weights(weights, products or inner_products(tensors), max_iter=max_iter, tol=tol)
    )


def karcher_weights(
    weights: Sequence[float],
    products: Products,
    *,
    max_iter: int = KARCHER_STEPS,
    tol: float = KARCHER_TOLERANCE,
) -> list[float]:
    """The factors with which the merge method `karcher` sums the tensors.

    The method computes the weighted mean of the tensors' directions by iteration, with the weights `weights`.
    `products` has the inner products of all pairs of tensors. Inner products are sufficient, because the mean direction
    is at every step a weighted sum of the tensors' directions. The iteration ends after `max_iter` steps, or as soon as
    a step would be shorter than `tol`.
    """
    if len(products) == 1:
        return [1.0]
    shares, norms = shares_of("karcher", weights), _norms(products)
    length = scalars.fsum(share * size for share, size in zip(shares, norms, strict=True))
    pointing = [i for i, size in enumerate(norms) if size > tol and shares[i] != 0]
    found = [0.0] * len(products)
    if not pointing:
        return found
    cosines = [[max(-1.0, min(1.0, products[i][j] / (norms[i] * norms[j]))) for j in pointing] for i in pointing]
    shares = shares_of("karcher", [shares[i] for i in pointing])
    size = _length(shares, cosines)
    has_mean = size >= max(tol, NO_MEAN)
    mean = [share / size for share in shares] if has_mean else [1.0] + [0.0] * (len(pointing) - 1)
    for _ in range(max_iter):
        step = [0.0] * len(pointing)
        for i, share in enumerate(shares):
            along = max(-1.0, min(1.0, scalars.fsum(m * c for m, c in zip(mean, cosines[i], strict=True))))
            theta = scalars.acos(along)
            if theta < max(tol, SMALLEST_ANGLE) or scalars.sin(theta) < SMALLEST_ANGLE:
                continue  # at the mean already, or opposite to it: no direction leads there
            factor = share * theta / scalars.sin(theta)
            step = [part - of_mean * factor * along for part, of_mean in zip(step, mean, strict=True)]
            step[i] += factor
        size = _length(step, cosines)
        if size < max(tol, SMALLEST_ANGLE):
            break
        mean = [m * scalars.cos(size) + s * scalars.sin(size) / size for m, s in zip(mean, step, strict=True)]
        size = _length(mean, cosines)
        mean = [m / size for m in mean]
    for i, of_mean in zip(pointing, mean, strict=True):
        found[i] = of_mean / norms[i] * length
    return found


def _norms(products: Products) -> list[float]:
    return [math.sqrt(row[i]) for i, row in enumerate(products)]


def _length(coefficients: Sequence[float], products: Products) -> float:
    """The norm of a linear combination of vectors, from its coefficients and the vectors' inner products."""
    terms = (
        a * b * product
        for a, row in zip(coefficients, products, strict=True)
        for b, product in zip(coefficients, row, strict=True)
    )
    return scalars.sqrt(max(0.0, scalars.fsum(terms)))
