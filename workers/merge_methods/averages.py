"""Averages and interpolations of whole models: linear, the SLERP family, Karcher mean, Model Stock, two fusions of a
pair. Equation numbers are those of "Automated Model Merging", section A.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COEFFICIENT_DECIMALS
from workers.merge_methods.arithmetic import cosine, dot, norm, row_cosines, weighted_sum

__all__ = [
    "arcee_fusion",
    "karcher",
    "linear",
    "linear_weights",
    "model_stock",
    "model_stock_rows",
    "multislerp",
    "multislerp_task_vectors",
    "nearswap",
    "nuslerp",
    "nuslerp_columns",
    "nuslerp_rows",
    "nuslerp_task_vectors",
    "nuslerp_weights",
    "passthrough",
    "slerp",
    "slerp_weights",
]

# Beyond this |cos| SLERP interpolates straight, see `slerp`. The value is the customary one.
COLLINEAR = 0.9995
# NuSLERP stays on the circle longer; beyond this line and circle differ by less than float32 shows, see `nuslerp`.
NUSLERP_COLLINEAR = 1 - 1e-7
# Weights that sum to less say nothing about the share of each.
NO_WEIGHT = 10.0**-COEFFICIENT_DECIMALS
# Multi-SLERP's epsilon: added to norms it divides by, and the norm below which the weighted mean has no direction.
MULTISLERP_EPSILON = 1e-8
# Karcher mean: at most so many steps, until a step is shorter than the tolerance.
KARCHER_STEPS, KARCHER_TOLERANCE = 10, 1e-5
# Model Stock's denominator 1 + (N - 1) cos below this has no finite ratio: the base stays.
SINGULAR = 1e-6


def passthrough(tensors: Sequence[torch.Tensor], *, scale: float = 1) -> torch.Tensor:
    """scale * theta: the one source as it is, or scaled (mergekit's passthrough with `scale`)."""
    return tensors[0] if scale == 1 else tensors[0] * scale


def linear(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted average, eq. 11: sum_t w_t theta_t with sum_t w_t = 1 (model soups, arXiv:2203.05482).

    The weights are divided by their sum, since weights rounded to six decimals seldom sum to exactly one.
    Raises InvalidRecipe if they sum to zero.
    """
    return weighted_sum(tensors, linear_weights(weights))


def linear_weights(weights: Sequence[float]) -> list[float]:
    """What `linear` multiplies each tensor with."""
    return _shares("linear", weights)


def slerp(first: torch.Tensor, second: torch.Tensor, *, t: float, cos: float | None = None) -> torch.Tensor:
    """Spherical interpolation, eq. 10 (Shoemake 1985), with omega the angle between the whole tensors, its cosine being
    `cos` where it is known; t = 0 is `first`. The tensors keep their norms: directions only decide the angle.

    Where |cos omega| > 0.9995 it is the straight line: sin omega, the divisor, goes to zero there, a float32 angle has
    lost its digits, two nearly equal tensors differ from the line by less than 1.3e-4, and between opposite tensors no
    great circle is the right one. A tensor without direction (norm at most 1e-8) is taken as orthogonal to the other.
    """
    return weighted_sum((first, second), slerp_weights(t, cosine(first, second) if cos is None else cos))


def slerp_weights(t: float, cos: float) -> tuple[float, float]:
    """What `slerp` multiplies the two tensors with."""
    return _circle_weights(t, cos, COLLINEAR)


def nuslerp(tensors: Sequence[torch.Tensor], *, weights: Sequence[float], cos: float | None = None) -> torch.Tensor:
    """SLERP, eq. 10, with t = w_2 / (w_1 + w_2); equal shares where the weights sum to zero (mergekit's NuSLERP,
    `nuslerp_flatten`).

    Unlike `slerp` it stays on the circle almost to collinear tensors, where line and circle agree in float32, and to
    opposite ones, where the circle is decided by rounding: beyond |cos omega| = 1 - 1e-7 it is the straight line.
    """
    first, second = tensors
    return weighted_sum(tensors, nuslerp_weights(weights, cosine(first, second) if cos is None else cos))


def nuslerp_weights(weights: Sequence[float], cos: float) -> tuple[float, float]:
    """What `nuslerp` multiplies the two tensors with."""
    return _circle_weights(_t(weights), cos, NUSLERP_COLLINEAR)


def nuslerp_rows(tensors: Sequence[torch.Tensor], *, weights: Sequence[float]) -> torch.Tensor:
    """`nuslerp` of each row (all but the last index fixed) by its own angle (mergekit: `nuslerp_flatten: false`)."""
    first, second = tensors
    t, cosines = _t(weights), row_cosines(first, second)
    is_straight = cosines.abs() > NUSLERP_COLLINEAR
    omega = torch.acos(torch.where(is_straight, 0, cosines))
    shares = [
        torch.where(is_straight, straight, torch.sin(straight * omega) / torch.sin(omega)).float()
        for straight in (1 - t, t)
    ]
    return first * shares[0] + second * shares[1]


def nuslerp_columns(tensors: Sequence[torch.Tensor], *, weights: Sequence[float]) -> torch.Tensor:
    """`nuslerp` along the first index instead of the last (mergekit: `nuslerp_row_wise: true` besides)."""
    turned = nuslerp_rows([tensor.transpose(0, -1) for tensor in tensors], weights=weights)
    return turned.transpose(0, -1).contiguous()


def nuslerp_task_vectors(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, weights: Sequence[float]
) -> torch.Tensor:
    """theta_pre + `nuslerp` of the task vectors (mergekit's NuSLERP with a base model)."""
    return nuslerp([tensor - base for tensor in tensors], weights=weights).add_(base)


def multislerp(tensors: Sequence[torch.Tensor], *, weights: Sequence[float]) -> torch.Tensor:
    """Barycentric interpolation on the hypersphere (mergekit's Multi-SLERP, goddard.blog/posts/multislerp).

    With w_t summing to one, u_t = theta_t / |theta_t| and m = sum_t w_t u_t / |sum_t w_t u_t|: the tangent vectors
    v = sum_t w_t (u_t - <u_t, m> m) at m give (m cos |v| + v sin |v| / |v|) * sum_t w_t |theta_t|. Where the weighted
    mean direction vanishes, two tensors are interpolated straight; more raise InvalidRecipe. A single tensor is itself.
    """
    if len(tensors) == 1:
        return tensors[0]
    shares = _shares("multislerp", weights)
    norms = [norm(tensor) for tensor in tensors]
    units = [tensor * (1 / (size + MULTISLERP_EPSILON)) for tensor, size in zip(tensors, norms, strict=True)]
    mean = weighted_sum(units, shares)
    size = norm(mean)
    if size < MULTISLERP_EPSILON:
        if len(tensors) == 2 or max(norms) == 0:
            return weighted_sum(tensors, shares)
        raise InvalidRecipe(
            f"multislerp: the directions of {len(tensors)} tensors cancel with weights {tuple(weights)}: there is no "
            "mean direction; use other weights or another method"
        )
    mean *= 1 / size
    along = [dot(unit, mean) for unit in units]
    tangent = weighted_sum(units, shares).sub_(mean * math.fsum(w * a for w, a in zip(shares, along, strict=True)))
    angle = norm(tangent) + MULTISLERP_EPSILON
    length = math.fsum(share * size for share, size in zip(shares, norms, strict=True))
    return mean.mul_(math.cos(angle) * length).add_(tangent.mul_(math.sin(angle) / angle * length))


def multislerp_task_vectors(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, weights: Sequence[float]
) -> torch.Tensor:
    """theta_pre + `multislerp` of the task vectors (mergekit's Multi-SLERP with a base model)."""
    if len(tensors) == 1:
        return tensors[0]
    return multislerp([tensor - base for tensor in tensors], weights=weights) + base


def karcher(tensors: Sequence[torch.Tensor], *, weights: Sequence[float]) -> torch.Tensor:
    """The Karcher (Riemannian) mean of directions on the unit sphere, times the mean norm (arXiv:2603.04972).

    The m with sum_t w_t log_m(u_t) = 0, by steps m <- exp_m(sum_t w_t log_m(u_t)) from the normalised mean, at most 10,
    until a step is shorter than 1e-5. Tensors without direction have a part in the mean norm, none in the direction. A
    single tensor is itself; the method's own weights are equal.
    """
    if len(tensors) == 1:
        return tensors[0]
    shares = _shares("karcher", weights)
    norms = [norm(tensor) for tensor in tensors]
    length = math.fsum(share * size for share, size in zip(shares, norms, strict=True))
    pointing = [i for i, size in enumerate(norms) if size > KARCHER_TOLERANCE and shares[i] != 0]
    if not pointing:
        return torch.zeros_like(tensors[0])
    units = [tensors[i] * (1 / norms[i]) for i in pointing]
    shares = _shares("karcher", [shares[i] for i in pointing])
    mean = weighted_sum(units, shares)
    size = norm(mean)
    mean = units[0].clone() if size < KARCHER_TOLERANCE else mean.mul_(1 / size)
    for _ in range(KARCHER_STEPS):
        step = torch.zeros_like(mean)
        for unit, share in zip(units, shares, strict=True):
            along = max(-1.0, min(1.0, dot(mean, unit)))
            theta = math.acos(along)
            if theta < KARCHER_TOLERANCE or math.sin(theta) < KARCHER_TOLERANCE:
                continue  # there already, or opposite: no direction leads there
            factor = share * theta / math.sin(theta)
            step += unit * factor - mean * (factor * along)
        size = norm(step)
        if size < KARCHER_TOLERANCE:
            break
        mean = mean.mul_(math.cos(size)).add_(step.mul_(math.sin(size) / size))
        mean.mul_(1 / norm(mean))
    return mean.mul_(length)


def model_stock(tensors: Sequence[torch.Tensor], base: torch.Tensor) -> torch.Tensor:
    """Model Stock (arXiv:2403.19522), of N models: theta_pre + t * (mean of the task vectors),
    t = N cos / (1 + (N - 1) cos), cos the mean cosine between task vectors of this tensor.

    A task vector of norm at most 1e-8 is orthogonal to the others. Where the denominator vanishes the base stays.
    """
    taus = [tensor - base for tensor in tensors]
    cosines = [cosine(taus[i], taus[j]) for i in range(len(taus)) for j in range(i + 1, len(taus))]
    ratio = _stock_ratio(torch.tensor([math.fsum(cosines) / len(cosines)], dtype=torch.float64), len(taus))
    return weighted_sum(taus, [float(ratio) / len(taus)] * len(taus)).add_(base)


def model_stock_rows(tensors: Sequence[torch.Tensor], base: torch.Tensor) -> torch.Tensor:
    """`model_stock` with a ratio for each row (mergekit: `filter_wise: true`)."""
    taus = [tensor - base for tensor in tensors]
    pairs = [(taus[i], taus[j]) for i in range(len(taus)) for j in range(i + 1, len(taus))]
    cosines = row_cosines(*pairs[0])
    for pair in pairs[1:]:
        cosines = cosines + row_cosines(*pair)
    ratio = _stock_ratio(cosines / len(pairs), len(taus))
    return weighted_sum(taus, [1 / len(taus)] * len(taus)).mul_(ratio.float()).add_(base)


def nearswap(tensors: Sequence[torch.Tensor], *, t: float) -> torch.Tensor:
    """The first model, each element moved towards the second's by at most t (mergekit's NearSwap):
    w theta_2 + (1 - w) theta_1 with w = min(1, t / |theta_1 - theta_2|)."""
    first, second = tensors
    share = (t / (first - second).abs_().clamp_(min=1e-6)).clamp_(max=1)
    return share * second + (1 - share) * first


def arcee_fusion(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The first model with the second's most important changes (mergekit's Arcee Fusion).

    Importance is |theta_2 - theta_1| * KL(softmax of theta_2's row | softmax of theta_1's row); elements whose
    importance is at least median + 1.5 (Q3 - Q1) are taken over. Quartiles are those of the whole tensor, by the
    element at floor(q (n - 1)) of the sorted ones.
    """
    first, second = tensors
    delta = second - first
    p, q = (torch.softmax(tensor, dim=-1).add_(1e-8) for tensor in (second, first))
    importance = delta.abs().mul_((p * torch.log(p / q)).sum(dim=-1, keepdim=True))
    ranks = importance.numel() - 1
    lower, median, upper = (
        torch.kthvalue(importance.flatten(), quarter * ranks // 4 + 1).values for quarter in (1, 2, 3)
    )
    return delta.masked_fill_(importance < median + 1.5 * (upper - lower), 0).add_(first)


def _shares(method: str, weights: Sequence[float]) -> list[float]:
    total = math.fsum(weights)
    if abs(total) < NO_WEIGHT:
        raise InvalidRecipe(f"{method}: weights {tuple(weights)} sum to {total}; they must not sum to zero")
    return [weight / total for weight in weights]


def _t(weights: Sequence[float]) -> float:
    total = math.fsum(weights)
    return 0.5 if abs(total) < NO_WEIGHT else weights[1] / total


def _circle_weights(t: float, cos: float, straight_beyond: float) -> tuple[float, float]:
    if abs(cos) > straight_beyond:
        return 1 - t, t
    omega = math.acos(cos)
    return math.sin((1 - t) * omega) / math.sin(omega), math.sin(t * omega) / math.sin(omega)


def _stock_ratio(cosines: torch.Tensor, num_models: int) -> torch.Tensor:
    denominator = 1 + (num_models - 1) * cosines
    is_singular = denominator.abs() < SINGULAR
    return torch.where(is_singular, 0, num_models * cosines / torch.where(is_singular, 1, denominator))
