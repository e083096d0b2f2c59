"""The rule that each fused method comes down to, given its coefficients and what is known of its operands.

A rule whose numbers depend on what a method drops or selects is found by a pass of its own, on CPU.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from search_spaces.recipe import Merge
from workers.merging.kernels.rules import (
    Agreed,
    AgreeingSum,
    Between,
    Dropped,
    Important,
    Interpolation,
    Mean,
    Nearswap,
    Rule,
    Sampled,
    SharedOut,
    Sum,
    TaskSum,
    Trimmed,
    Variable,
    VariableElection,
    Weighted,
    WeightedMean,
    WeightedSum,
    Whole,
)
from workers.merging.masks import key_words, threshold
from workers.merging.methods import (
    Operands,
    Products,
    cosine_of,
    cut_ranks,
    karcher_weights,
    l1_ratio,
    linear_weights,
    m3_lambdas,
    model_stock_weights,
    multislerp_weights,
    num_kept,
    num_selected,
    nuslerp_weights,
    probability_by_rank,
    ramplus_factor,
    row_width,
    sce_mergekit_weights,
    sce_weights,
    slerp_weights,
)
from workers.merging.methods.competition import NO_SQUARES
from workers.merging.order_statistics import MagnitudeTable, Trim

__all__ = ["FUSED", "ON_CUDA"]

# What is no smaller than 0 and than infinity; the latter is also above all.
ALL, NOTHING = Trim(0.0, 0.0), Trim(math.inf, math.inf)


def _weighted_sum(weights: Callable[[Merge, Operands], Sequence[float]]) -> Callable[[Merge, Operands], Rule]:
    return lambda merge, stored: WeightedSum(tuple(weights(merge, stored)))


def _task_sum(weights: Callable[[Merge, Operands], Sequence[float]]) -> Callable[[Merge, Operands], Rule]:
    return lambda merge, stored: TaskSum(tuple(weights(merge, stored)))


def _multislerp_task_vectors(merge: Merge, stored: Operands) -> Rule:
    if len(stored.tensors) == 1:
        return WeightedSum((1.0,))
    return TaskSum(tuple(multislerp_weights(merge.per_source("weight"), _products(stored))))


def _ram(merge: Merge, stored: Operands) -> Rule:
    return SharedOut(merge.number("epsilon"), (1.0,) * len(stored.tensors))


def _ramplus_tl(merge: Merge, stored: Operands) -> Rule:
    r, alpha, epsilon = merge.number("r"), merge.number("alpha"), merge.number("epsilon")
    counts = _sums().shared_counts(epsilon, stored.tensors, stored.base)
    return SharedOut(epsilon, tuple(ramplus_factor(r, alpha, changed, alone) for changed, alone in counts))


def _consensus_ta(merge: Merge, stored: Operands) -> Rule:
    return Agreed(Whole(), merge.number("lambda"), merge.per_source("mask_lambda"), merge.number("agreement"))


def _consensus_ties(merge: Merge, stored: Operands) -> Rule:
    sparse = _trimmed(stored, [merge.number("k")] * len(stored.tensors))
    return Agreed(sparse, merge.number("lambda"), merge.per_source("mask_lambda"), merge.number("agreement"))


def _ties(merge: Merge, stored: Operands) -> Rule:
    return Mean(_trimmed(stored, [merge.number("k")] * len(stored.tensors)), merge.number("lambda"))


def _ties_sum(merge: Merge, stored: Operands) -> Rule:
    return AgreeingSum(_trimmed(stored, [merge.number("k")] * len(stored.tensors)), merge.number("lambda"))


def _m3_ties(merge: Merge, stored: Operands) -> Rule:
    sparse = _trimmed(stored, [merge.number("k")] * len(stored.tensors))
    return Interpolation(sparse, merge.per_source("weight"), merge.number("lambda"))


def _ties_weighted(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _trimmed(stored, merge.per_source("density")))


def _ties_peft(merge: Merge, stored: Operands) -> Rule:
    return WeightedMean(_trimmed(stored, merge.per_source("density")), merge.per_source("weight"))


def _breadcrumbs(merge: Merge, stored: Operands) -> Rule:
    return Sum(_between(merge, stored), merge.per_source("lambda"))


def _breadcrumbs_ties(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _between(merge, stored))


def _dare_linear(merge: Merge, stored: Operands) -> Rule:
    return _dare_sum(merge, stored, merge.per_source("lambda"))


def _m3_dare(merge: Merge, stored: Operands) -> Rule:
    return _dare_sum(merge, stored, m3_lambdas(merge.per_source("weight"), merge.number("lambda")))


def _dare_sum(merge: Merge, stored: Operands, lambdas: Sequence[float]) -> Rule:
    densities = merge.per_source("density")
    factors = tuple(lambda_ / density for lambda_, density in zip(lambdas, densities, strict=True))
    return Sum(_dropped(merge, stored, [1.0] * len(factors)), factors)


def _dare_linear_l1(merge: Merge, stored: Operands) -> Rule:
    return Sum(_dropped_l1(merge, stored), merge.per_source("lambda"))


def _dare_ties(merge: Merge, stored: Operands) -> Rule:
    scales = [1 / density for density in merge.per_source("density")]
    return Mean(_dropped(merge, stored, scales), merge.number("lambda"))


def _dare_ties_l1(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _dropped_l1(merge, stored))


def _della(merge: Merge, stored: Operands) -> Rule:
    return Mean(_sampled(merge, stored), merge.number("lambda"))


def _della_l1(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _sampled(merge, stored, is_l1=True))


def _della_linear(merge: Merge, stored: Operands) -> Rule:
    return Sum(_sampled(merge, stored), merge.per_source("lambda"))


def _della_linear_l1(merge: Merge, stored: Operands) -> Rule:
    return Sum(_sampled(merge, stored, is_l1=True), merge.per_source("lambda"))


def _sce(merge: Merge, stored: Operands) -> Rule:
    threshold, squares = _variable_squares(merge, stored)
    return Variable(threshold, threshold, 0, tuple(sce_weights(squares)))


def _sce_mergekit(merge: Merge, stored: Operands) -> Rule:
    threshold, squares = _variable_squares(merge, stored)
    weights = sce_mergekit_weights(squares, stored.tensors[0].numel())
    return VariableElection(threshold, threshold, 0, tuple(weights), NO_SQUARES)


def _variable_squares(merge: Merge, stored: Operands) -> tuple[float, list[float]]:
    """The variance from which on an element is selected, and the sums of squares of every tau's selected elements."""
    select_topk, table = merge.number("select_topk"), stored.variances
    assert table is not None, f"{merge.method} was not given the variances"
    count = num_selected(select_topk, table.num_not_zero)
    trim = ALL if select_topk == 1 else table.trim(count) if count else NOTHING
    found: tuple[float, list[float]] = _sums().variable_squares(trim, stored.tensors, stored.base)
    return found


def _arcee_fusion(merge: Merge, stored: Operands) -> Rule:
    assert stored.importance is not None, "arcee_fusion was not given the importance"
    return Important(stored.importance.threshold, stored.importance.rows)


def _weighted(merge: Merge, sparse: Trimmed | Between | Dropped | Sampled) -> Rule:
    return Weighted(sparse, merge.per_source("weight"), merge.number("lambda"), merge.number("normalize"))


def _trimmed(stored: Operands, shares: Sequence[float]) -> Trimmed:
    ranks = [num_kept(share, stored.tensors[0].numel()) for share in shares]
    return Trimmed(*_bounds(table.trim(rank) for table, rank in zip(_magnitudes(stored), ranks, strict=True)))


def _between(merge: Merge, stored: Operands) -> Between:
    bottom, top = [], []
    cuts = zip(_magnitudes(stored), merge.per_source("density"), merge.per_source("gamma"), strict=True)
    for table, density, gamma in cuts:
        ranks = cut_ranks(density, gamma, stored.tensors[0].numel())
        top.append(table.trim(ranks[0]) if ranks else NOTHING)
        bottom.append(table.trim(ranks[1]) if ranks else ALL)
    return Between(*_bounds(bottom), *_bounds(top))


def _bounds(trims: Iterable[Trim]) -> tuple[tuple[float, ...], tuple[float, ...], tuple[int, ...]]:
    lows, highs, ranks = zip(*((trim.low, trim.high, trim.num_smaller) for trim in trims), strict=True)
    return lows, highs, ranks


def _dropped(merge: Merge, stored: Operands, scales: Sequence[float]) -> Dropped:
    assert stored.keys is not None, f"{merge.method} was given no keys"
    k0s, k1s = zip(*map(key_words, stored.keys), strict=True)
    bounds = tuple(threshold(density) - 1 for density in merge.per_source("density"))
    return Dropped(k0s, k1s, bounds, tuple(scales))


def _dropped_l1(merge: Merge, stored: Operands) -> Dropped:
    sparse = _dropped(merge, stored, [1.0] * len(stored.tensors))
    return sparse._replace(scales=_l1_scales(sparse, stored))


def _sampled(merge: Merge, stored: Operands, *, is_l1: bool = False) -> Sampled:
    assert stored.keys is not None, f"{merge.method} was given no keys"
    assert stored.ranks is not None, f"{merge.method} was given no ranks"
    k0s, k1s = zip(*map(key_words, stored.keys), strict=True)
    width = row_width(stored.tensors[0])
    pairs = zip(merge.per_source("density"), merge.per_source("epsilon"), strict=True)
    lines = [probability_by_rank(width, density, epsilon, is_symmetric=is_l1) for density, epsilon in pairs]
    origins, starts, steps = zip(*lines, strict=True)
    every = (1.0,) * len(lines)
    sparse = Sampled(k0s, k1s, stored.ranks, origins, starts, steps, (0.0,) * len(lines) if is_l1 else every, every)
    return sparse._replace(scales=_l1_scales(sparse, stored)) if is_l1 else sparse


def _l1_scales(sparse: Dropped | Sampled, stored: Operands) -> tuple[float, ...]:
    return tuple(l1_ratio(*norms) for norms in _sums().kept_norms(sparse, stored.tensors, stored.base))


def _magnitudes(stored: Operands) -> tuple[MagnitudeTable, ...]:
    tables = tuple(table for table in stored.magnitudes or () if table is not None)
    assert len(tables) == len(stored.tensors), "not given the magnitudes of all sources"
    return tables


def _cosine(stored: Operands) -> float:
    assert stored.cosine is not None, "the cosine was not given"
    return stored.cosine


def _products(stored: Operands) -> Products:
    assert stored.products is not None, "the inner products were not given"
    return stored.products


def _sums() -> Any:
    return importlib.import_module("workers.merging.kernels.reductions")


FUSED: Mapping[str, Callable[[Merge, Operands], Rule]] = {
    "passthrough": _weighted_sum(lambda merge, stored: [merge.number("scale")]),
    "linear": _weighted_sum(lambda merge, stored: linear_weights(merge.per_source("weight"))),
    "slerp": _weighted_sum(lambda merge, stored: slerp_weights(merge.number("t"), _cosine(stored))),
    "nuslerp": _weighted_sum(lambda merge, stored: nuslerp_weights(merge.per_source("weight"), _cosine(stored))),
    "nuslerp_task_vectors": _task_sum(
        lambda merge, stored: nuslerp_weights(merge.per_source("weight"), cosine_of(_products(stored), 0, 1))
    ),
    "multislerp": _weighted_sum(
        lambda merge, stored: multislerp_weights(merge.per_source("weight"), _products(stored))
    ),
    "multislerp_task_vectors": _multislerp_task_vectors,
    "karcher": _weighted_sum(lambda merge, stored: karcher_weights(merge.per_source("weight"), _products(stored))),
    "model_stock": _task_sum(lambda merge, stored: model_stock_weights(_products(stored))),
    "nearswap": lambda merge, stored: Nearswap(merge.number("t")),
    "arcee_fusion": _arcee_fusion,
    "ram": _ram,
    "ramplus_tl": _ramplus_tl,
    "sce": _sce,
    "sce_mergekit": _sce_mergekit,
    "consensus_ta": _consensus_ta,
    "consensus_ties": _consensus_ties,
    "task_arithmetic": lambda merge, stored: Sum(Whole(), merge.per_source("lambda")),
    "ties": _ties,
    "ties_sum": _ties_sum,
    "ties_weighted": _ties_weighted,
    "ties_peft": _ties_peft,
    "m3_ties": _m3_ties,
    "dare_linear": _dare_linear,
    "dare_linear_l1": _dare_linear_l1,
    "dare_ties": _dare_ties,
    "dare_ties_l1": _dare_ties_l1,
    "m3_dare": _m3_dare,
    "della": _della,
    "della_l1": _della_l1,
    "della_linear": _della_linear,
    "della_linear_l1": _della_linear_l1,
    "breadcrumbs": _breadcrumbs,
    "breadcrumbs_ties": _breadcrumbs_ties,
}
# The others run on a GPU by their plain methods.
ON_CUDA = frozenset(
    {
        "passthrough",
        "linear",
        "slerp",
        "nuslerp",
        "nuslerp_task_vectors",
        "multislerp",
        "multislerp_task_vectors",
        "karcher",
        "model_stock",
        "nearswap",
        "ram",
        "task_arithmetic",
        "ties",
        "dare_linear",
        "m3_dare",
        "dare_ties",
    }
)
