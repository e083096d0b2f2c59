"""Kernel rules of passthrough, averages, interpolations, NearSwap and Arcee Fusion."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from search_spaces.recipe import Merge
from workers.merging.kernels.lowering.base import cosine, fuses, products
from workers.merging.kernels.operations import ONE, computes, larger, value
from workers.merging.kernels.rules import Important, Rule, TaskSum, WeightedSum
from workers.merging.methods.arithmetic import cosine_of
from workers.merging.methods.averages import (
    linear_weights,
    model_stock_weights,
    nuslerp_weights,
    slerp_weights,
)
from workers.merging.methods.plain import Operands
from workers.merging.methods.spherical import karcher_weights, multislerp_weights

__all__ = ["Nearswap"]

NEAREST = np.float32(1e-6)  # the smallest distance that NearSwap divides by


@fuses("passthrough", is_on_cuda=True)
def _passthrough(merge: Merge, stored: Operands) -> Rule:
    return WeightedSum((merge.number("scale"),))


@fuses("linear", is_on_cuda=True)
def _linear(merge: Merge, stored: Operands) -> Rule:
    return WeightedSum(tuple(linear_weights(merge.per_source("weight"))))


@fuses("weighted_sum", is_on_cuda=True)
def _weighted_sum(merge: Merge, stored: Operands) -> Rule:
    return WeightedSum(merge.per_source("weight"))


@fuses("slerp", is_on_cuda=True)
def _slerp(merge: Merge, stored: Operands) -> Rule:
    return WeightedSum(slerp_weights(merge.number("t"), cosine(stored)))


@fuses("nuslerp", is_on_cuda=True)
def _nuslerp(merge: Merge, stored: Operands) -> Rule:
    return WeightedSum(nuslerp_weights(merge.per_source("weight"), cosine(stored)))


@fuses("nuslerp_task_vectors", is_on_cuda=True)
def _nuslerp_task_vectors(merge: Merge, stored: Operands) -> Rule:
    return TaskSum(nuslerp_weights(merge.per_source("weight"), cosine_of(products(stored), 0, 1)))


@fuses("multislerp", is_on_cuda=True)
def _multislerp(merge: Merge, stored: Operands) -> Rule:
    return WeightedSum(_multislerp_weights(merge, stored))


@fuses("multislerp_task_vectors", is_on_cuda=True)
def _multislerp_task_vectors(merge: Merge, stored: Operands) -> Rule:
    if len(stored.tensors) == 1:
        return WeightedSum((1.0,))
    return TaskSum(_multislerp_weights(merge, stored))


def _multislerp_weights(merge: Merge, stored: Operands) -> tuple[float, ...]:
    return tuple(multislerp_weights(merge.per_source("weight"), products(stored), eps=merge.number("eps")))


@fuses("karcher", is_on_cuda=True)
def _karcher(merge: Merge, stored: Operands) -> Rule:
    steps, tol = int(merge.number("max_iter")), merge.number("tol")
    return WeightedSum(tuple(karcher_weights(merge.per_source("weight"), products(stored), max_iter=steps, tol=tol)))


@fuses("model_stock", is_on_cuda=True)
def _model_stock(merge: Merge, stored: Operands) -> Rule:
    unbounded = bool(merge.number("unbounded"))
    return TaskSum(tuple(model_stock_weights(products(stored), unbounded=unbounded, name=stored.name)))


class Nearswap(NamedTuple):
    """Rule of the merge method NearSwap: the first of two sources, moved towards the second.

    Each element moves at most by the distance `t`.
    """

    t: float


@computes(Nearswap)
def _nearer(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    a, b = value(xs[0][i]), value(xs[1][i])
    share = ONE / larger(abs(a - b), NEAREST) * rule.t
    share = share if share < ONE else ONE
    return share * b + (ONE - share) * a


@fuses("nearswap", is_on_cuda=True)
def _nearswap(merge: Merge, stored: Operands) -> Rule:
    return Nearswap(merge.number("t"))


@fuses("arcee_fusion")
def _arcee_fusion(merge: Merge, stored: Operands) -> Rule:
    assert stored.importance is not None, "arcee_fusion was not given the importance"
    return Important(stored.importance.threshold, stored.importance.rows)
