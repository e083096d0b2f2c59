"""Averages and interpolations of whole models: linear, SLERP and NuSLERP, Model Stock.

Equation numbers are those of "Automated Model Merging", section A.2.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COEFFICIENT_DECIMALS
from workers.merging.methods import scalars
from workers.merging.methods.arithmetic import (
    Products,
    cosine,
    cosine_of,
    inner_products,
    row_cosines,
    weighted_sum,
)
from workers.merging.methods.peaks import Peak
from workers.merging.methods.registry import merges

__all__ = [
    "linear",
    "linear_weights",
    "model_stock",
    "model_stock_rows",
    "model_stock_weights",
    "nuslerp",
    "nuslerp_columns",
    "nuslerp_columns_task_vectors",
    "nuslerp_rows",
    "nuslerp_rows_task_vectors",
    "nuslerp_task_vectors",
    "nuslerp_weights",
    "passthrough",
    "shares_of",
    "slerp",
    "slerp_weights",
    "weighted",
]

log = logging.getLogger(__name__)

# Above this |cos|, SLERP interpolates linearly (see `slerp`). The value is the usual one.
COLLINEAR = 0.9995
# NuSLERP is linear only above this |cos|, where line and circle are equal in float32 (see `nuslerp`).
NUSLERP_COLLINEAR = 1 - 1e-7
# If the weights sum to less, their shares are undefined.
NO_WEIGHT = 10.0**-COEFFICIENT_DECIMALS
# Below this denominator 1 + (N - 1) cos Model Stock has no finite ratio: the result is the base.
SINGULAR = 1e-6
# The largest error that rounding may add to a ratio at the ends of its range.
STOCK_ROUNDING = 1e-6


@merges("passthrough", peak=Peak(0, 4))
def passthrough(tensors: Sequence[torch.Tensor], *, scale: float = 1) -> torch.Tensor:
    """Copy of the only tensor in `tensors`, multiplied by `scale` (mergekit's passthrough).

    The result is scale * theta, with theta this tensor.
    """
    is_copy = scale == 1 and not isinstance(scale, torch.Tensor)
    return tensors[0] if is_copy else tensors[0] * scale


@merges("linear", peak=Peak(0, 8))
def linear(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted average of models, with weights that are divided by their sum (model soups, arXiv:2203.05482).

    The result is sum_t w_t theta_t with sum_t w_t = 1. theta_t is the tensor of model t in `tensors`, and w_t is its
    weight; this is equation 11 of "Automated Model Merging". The given weights are divided by their sum, because
    weights rounded to six decimals seldom sum to exactly one. Raises InvalidRecipe if the weights sum to zero.
    """
    return weighted_sum(tensors, linear_weights(weights))


@merges("weighted_sum", peak=Peak(0, 8))
def weighted(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Weighted sum of models, with weights used as given (mergekit's linear with `normalize: false`).

    The result is sum_t w_t theta_t. theta_t is the tensor of model t, and w_t is its weight.
    """
    return weighted_sum(tensors, weights)


def linear_weights(weights: Sequence[float]) -> list[float]:
    """The factor of each tensor in the merge method `linear`: its weight divided by the sum of the weights.

    Raises InvalidRecipe if the sum is zero.
    """
    return shares_of("linear", weights)


@merges("slerp", peak=Peak(0, 8))
def slerp(tensors: Sequence[torch.Tensor], *, t: float, cos: float | None = None) -> torch.Tensor:
    """Spherical interpolation of two tensors (Shoemake 1985); t = 0 gives the first tensor, t = 1 gives the second.

    The result is (sin((1 - t) omega) theta_1 + sin(t omega) theta_2) / sin omega, equation 10 of "Automated Model
    Merging". theta_1 and theta_2 are the tensors, and omega is the angle between them as vectors. `cos` is the
    precomputed cosine of omega; None computes it. The tensors are not normalised before they are interpolated; only
    omega is computed from their directions alone.

    If |cos omega| > 0.9995, the interpolation is linear. The divisor sin omega then goes to zero, and an angle in
    float32 has few significant digits. For nearly equal tensors, the spherical and the linear interpolation differ by
    less than 1.3e-4. For opposite tensors, the great circle between them is not unique. A tensor without direction
    (norm at most 1e-8) counts as orthogonal to the other tensor.
    """
    first, second = tensors
    return weighted_sum(tensors, slerp_weights(t, cosine(first, second) if cos is None else cos))


def slerp_weights(t: float, cos: float) -> tuple[float, float]:
    """Factors by which the function `slerp` (spherical interpolation) multiplies its two tensors before the sum.

    `t` is the share of the second tensor, from 0 (only the first tensor) to 1 (only the second), and `cos` is the
    cosine of the angle between them.
    """
    return _circle_weights(t, cos, COLLINEAR)


@merges("nuslerp", peak=Peak(0, 8))
def nuslerp(tensors: Sequence[torch.Tensor], *, weights: Sequence[float], cos: float | None = None) -> torch.Tensor:
    """Spherical interpolation of two tensors with t = w_2 / (w_1 + w_2) (mergekit's NuSLERP with `nuslerp_flatten`).

    w_1 and w_2 are the weights; if they sum to zero, both tensors have equal shares. omega is the angle between the
    whole tensors. `cos` is the precomputed cosine of omega; None computes it. Unlike in the method `slerp`, the
    interpolation is spherical up to |cos omega| = 1 - 1e-7, and linear above. At this limit, the two interpolations of
    nearly equal tensors agree in float32.
    """
    first, second = tensors
    return weighted_sum(tensors, nuslerp_weights(weights, cosine(first, second) if cos is None else cos))


def nuslerp_weights(weights: Sequence[float], cos: float) -> tuple[float, float]:
    """Factors by which the function `nuslerp` (spherical interpolation) multiplies its two tensors before the sum.

    `weights` are the weights of the tensors, and `cos` is the cosine of the angle between them.
    """
    return _circle_weights(_t(weights), cos, NUSLERP_COLLINEAR)


@merges("nuslerp_rows", peak=Peak(0, 25))
def nuslerp_rows(tensors: Sequence[torch.Tensor], *, weights: Sequence[float]) -> torch.Tensor:
    """Spherical interpolation of two tensors, each row by its own angle (mergekit: `nuslerp_flatten: false`).

    A row is a vector along the last dimension. The share t of the second tensor is w_2 / (w_1 + w_2), with w_1 and w_2
    the weights; it is 1/2 if the weights sum to zero. Rows whose angle has a cosine of magnitude above 1 - 1e-7 are
    interpolated linearly.
    """
    first, second = tensors
    t, cosines = _t(weights), row_cosines(first, second)
    is_straight = cosines.abs() > NUSLERP_COLLINEAR
    omega = torch.acos(torch.where(is_straight, 0, cosines))
    shares = [
        torch.where(is_straight, straight, torch.sin(straight * omega) / torch.sin(omega)).to(first.dtype)
        for straight in (1 - t, t)
    ]
    return first * shares[0] + second * shares[1]


@merges("nuslerp_columns", peak=Peak(0, 25, more_on_gpu=16))
def nuslerp_columns(tensors: Sequence[torch.Tensor], *, weights: Sequence[float]) -> torch.Tensor:
    """Spherical interpolation of two tensors, each column by its own angle.

    A column is a vector along the first dimension. The method `nuslerp_rows` does the same for vectors along the last
    dimension. In mergekit, which calls columns rows, this method is NuSLERP with `nuslerp_flatten: false` and
    `nuslerp_row_wise: true`. `weights`
    are the weights w_1 and w_2 of the tensors. The second tensor has the share w_2 / (w_1 + w_2).
    """
    turned = nuslerp_rows([tensor.transpose(0, -1) for tensor in tensors], weights=weights)
    return turned.transpose(0, -1).contiguous()


@merges("nuslerp_task_vectors", peak=Peak(4, 8))
def nuslerp_task_vectors(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    weights: Sequence[float],
    products: Products | None = None,
) -> torch.Tensor:
    """The base plus the spherical interpolation (`nuslerp`) of two task vectors.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `weights` are the weights
    w_1 and w_2 of the two task vectors; in the interpolation, the second task vector has the share w_2 / (w_1 + w_2).
    `products` are the precomputed inner products of the task vectors; None computes them. In mergekit this method is
    NuSLERP with a base model.
    """
    cos = None if products is None else cosine_of(products, 0, 1)
    return nuslerp([tensor - base for tensor in tensors], weights=weights, cos=cos).add_(base)


@merges("nuslerp_rows_task_vectors", peak=Peak(4, 25))
def nuslerp_rows_task_vectors(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, weights: Sequence[float]
) -> torch.Tensor:
    """The base plus the spherical interpolation of two task vectors row by row (`nuslerp_rows`).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `weights` are the weights
    w_1 and w_2 of the two task vectors; in the interpolation, the second task vector has the share w_2 / (w_1 + w_2).
    In mergekit this method is NuSLERP with a base model and `nuslerp_flatten: false`.
    """
    return nuslerp_rows([tensor - base for tensor in tensors], weights=weights) + base


@merges("nuslerp_columns_task_vectors", peak=Peak(4, 25, more_on_gpu=16))
def nuslerp_columns_task_vectors(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, weights: Sequence[float]
) -> torch.Tensor:
    """The base plus the spherical interpolation of two task vectors column by column (`nuslerp_columns`).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. `weights` are the weights
    w_1 and w_2 of the two task vectors; in the interpolation, the second task vector has the share w_2 / (w_1 + w_2).
    In mergekit this method is NuSLERP with a base model, `nuslerp_flatten: false` and `nuslerp_row_wise: true`.
    """
    return nuslerp_columns([tensor - base for tensor in tensors], weights=weights) + base


@merges("model_stock", peak=Peak(4, 8))
def model_stock(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    unbounded: bool = False,
    products: Products | None = None,
    name: str = "",
) -> torch.Tensor:
    """Model Stock (arXiv:2403.19522): the base plus the mean task vector, scaled by the similarity of the task vectors.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The factor is t = N cos /
    (1 + (N - 1) cos), with N the number of models and cos the mean cosine between the task vectors of this tensor. A
    task vector of norm at most 1e-8 counts as orthogonal to the other task vectors. `products` are the precomputed
    inner products of the task vectors; None computes them.

    If the denominator of t is zero, the result is the base. If t is below -N or above 1, InvalidRecipe is raised or,
    with `unbounded`, a warning is logged. The message names the tensor by `name`. The lower bound is -N because, for
    models at equal distances from the base, the result with t = -N is as far from the base as the models are.
    """
    taus = [tensor - base for tensor in tensors]
    weights = model_stock_weights(products or inner_products(taus), unbounded=unbounded, name=name)
    return weighted_sum(taus, weights).add_(base)


def model_stock_weights(products: Products, *, unbounded: bool = False, name: str = "") -> list[float]:
    """The factor of each task vector in the method `model_stock`, from the inner products of all pairs of them.

    If the factors are so large that the result is meaningless, InvalidRecipe is raised or, with `unbounded`, a warning
    is logged. The message names the tensor by `name`.
    """
    count = len(products)
    cosines = [cosine_of(products, i, j) for i in range(count) for j in range(i + 1, count)]
    mean = torch.tensor([math.fsum(cosines) / len(cosines)], dtype=torch.float64)
    ratio = _stock_ratio(mean, count, unbounded=unbounded, name=name)
    return [float(ratio) / count] * count


@merges("model_stock_rows", peak=Peak(4, 25))
def model_stock_rows(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, unbounded: bool = False, name: str = ""
) -> torch.Tensor:
    """Model Stock (`model_stock`) with a separate factor t for each row of the tensor (mergekit: `filter_wise: true`).

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is the base
    plus the mean task vector, each row multiplied by its factor. A row is a vector along the last dimension. If a
    factor is below -N or above 1, where N is the number of models, InvalidRecipe is raised or, with `unbounded`, a
    warning is logged. The message names the tensor by `name`.
    """
    taus = [tensor - base for tensor in tensors]
    pairs = [(taus[i], taus[j]) for i in range(len(taus)) for j in range(i + 1, len(taus))]
    cosines = row_cosines(*pairs[0])
    for pair in pairs[1:]:
        cosines = cosines + row_cosines(*pair)
    ratio = _stock_ratio(cosines / len(pairs), len(taus), unbounded=unbounded, name=name)
    return weighted_sum(taus, [1 / len(taus)] * len(taus)).mul_(ratio.float()).add_(base)


def shares_of(method: str, weights: Sequence[float]) -> list[float]:
    """A method's weights divided by their sum. Raises InvalidRecipe, naming the method, if the sum is zero."""
    total = scalars.fsum(weights)
    if abs(total) < NO_WEIGHT:
        raise InvalidRecipe(f"{method}: weights {tuple(weights)} sum to {total}; they must not sum to zero")
    return [weight / total for weight in weights]


def _t(weights: Sequence[float]) -> float:
    total = scalars.fsum(weights)
    return 0.5 if abs(total) < NO_WEIGHT else weights[1] / total


def _circle_weights(t: float, cos: float, straight_beyond: float) -> tuple[float, float]:
    if abs(cos) > straight_beyond:
        return 1 - t, t
    omega = math.acos(cos)
    return scalars.sin((1 - t) * omega) / math.sin(omega), scalars.sin(t * omega) / math.sin(omega)


def _stock_ratio(cosines: torch.Tensor, num_models: int, *, unbounded: bool, name: str) -> torch.Tensor:
    denominator = 1 + (num_models - 1) * cosines
    is_singular = denominator.abs() < SINGULAR
    ratio = torch.where(is_singular, 0, num_models * cosines / torch.where(is_singular, 1, denominator))
    is_outside = (ratio < -num_models - STOCK_ROUNDING) | (ratio > 1 + STOCK_ROUNDING)
    if is_outside.any():
        worst = int(torch.where(is_outside, ratio.abs(), 0).argmax())
        problem = (
            f"{name or 'a tensor'}: the ratio of model_stock is {float(ratio.flatten()[worst]):.4g}, at a mean cosine "
            f"of {float(cosines.flatten()[worst]):.4g} between the task vectors of {num_models} models"
        )
        if not unbounded:
            raise InvalidRecipe(f"{problem}; expected -{num_models} to 1: leave out a model, or use another method")
        log.warning("%s; beyond -%d to 1 it is further from the base than the models are", problem, num_models)
    return ratio
