"""Kernel rules of DARE, DELLA and Model Breadcrumbs."""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.recipe import Merge
from workers.merging.kernels.lowering.base import base, factors, fuses, magnitudes
from workers.merging.kernels.rules import (
    Between,
    Dropped,
    Mean,
    Rule,
    Sampled,
    Sum,
    Weighted,
    Whole,
    bounds,
    comparisons,
)
from workers.merging.masks import key_words, threshold
from workers.merging.methods.plain import Operands
from workers.merging.methods.sparsify import cut_ranks, l1_ratio, probability_by_rank, row_width
from workers.merging.methods.task_vectors import m3_lambdas
from workers.merging.order_statistics import ALL, NOTHING

__all__: list[str] = []


@fuses("dare_linear", is_on_cuda=True)
def _dare_linear(merge: Merge, stored: Operands) -> Rule:
    return _dare_sum(merge, stored, merge.per_source("lambda"))


@fuses("dare_linear_l1")
def _dare_linear_l1(merge: Merge, stored: Operands) -> Rule:
    return Sum(_dropped_l1(merge, stored), merge.per_source("lambda"))


@fuses("dare_ties", is_on_cuda=True)
def _dare_ties(merge: Merge, stored: Operands) -> Rule:
    scales = [1 / density for density in merge.per_source("density")]
    return Mean(_dropped(merge, stored, scales), merge.number("lambda"))


@fuses("dare_ties_l1")
def _dare_ties_l1(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _dropped_l1(merge, stored))


@fuses("m3_dare", is_on_cuda=True)
def _m3_dare(merge: Merge, stored: Operands) -> Rule:
    return _dare_sum(merge, stored, m3_lambdas(merge.per_source("weight"), merge.number("lambda")))


@fuses("della")
def _della(merge: Merge, stored: Operands) -> Rule:
    return Mean(_sampled(merge, stored), merge.number("lambda"))


@fuses("della_l1")
def _della_l1(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _sampled(merge, stored, is_l1=True))


@fuses("della_linear")
def _della_linear(merge: Merge, stored: Operands) -> Rule:
    return Sum(_sampled(merge, stored), merge.per_source("lambda"))


@fuses("della_linear_l1")
def _della_linear_l1(merge: Merge, stored: Operands) -> Rule:
    return Sum(_sampled(merge, stored, is_l1=True), merge.per_source("lambda"))


@fuses("breadcrumbs")
def _breadcrumbs(merge: Merge, stored: Operands) -> Rule:
    return Sum(_between(merge, stored), merge.per_source("lambda"))


@fuses("breadcrumbs_ties")
def _breadcrumbs_ties(merge: Merge, stored: Operands) -> Rule:
    return _weighted(merge, _between(merge, stored))


def _dare_sum(merge: Merge, stored: Operands, lambdas: Sequence[float]) -> Rule:
    densities = merge.per_source("density")
    scaled = tuple(lambda_ / density for lambda_, density in zip(lambdas, densities, strict=True))
    return Sum(_dropped(merge, stored, [1.0] * len(scaled)), scaled)


def _weighted(merge: Merge, sparse: Between | Dropped | Sampled) -> Rule:
    return Weighted(sparse, merge.per_source("weight"), merge.number("lambda"), merge.number("normalize"))


def _between(merge: Merge, stored: Operands) -> Between:
    bottom, top = [], []
    cuts = zip(magnitudes(stored), merge.per_source("density"), merge.per_source("gamma"), strict=True)
    for table, density, gamma in cuts:
        ranks = cut_ranks(density, gamma, table.num_elements)
        if ranks is None or ranks.is_empty:
            top.append(NOTHING)
            bottom.append(NOTHING if ranks else ALL)
        else:
            top.append(table.trim(ranks.largest))
            bottom.append(table.trim(ranks.smallest))
    by, top_by = comparisons(bottom, top)
    return Between(by, *bounds(bottom), factors(stored), top_by, *bounds(top))


def _dropped(merge: Merge, stored: Operands, scales: Sequence[float]) -> Dropped:
    assert stored.keys is not None, f"{merge.method} was given no keys"
    k0s, k1s = zip(*map(key_words, stored.keys), strict=True)
    largest_hashes = tuple(threshold(density) - 1 for density in merge.per_source("density"))
    return Dropped(k0s, k1s, largest_hashes, tuple(scales))


def _dropped_l1(merge: Merge, stored: Operands) -> Dropped:
    sparse = _dropped(merge, stored, [1.0] * len(stored.tensors))
    return sparse._replace(scales=_l1_scales(sparse, stored)) if merge.number("rescale") else sparse


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
    return sparse._replace(scales=_l1_scales(sparse, stored)) if is_l1 and merge.number("rescale") else sparse


def _l1_scales(sparse: Dropped | Sampled, stored: Operands) -> tuple[float, ...]:
    from workers.merging.kernels.reductions import kept_norms

    norms = kept_norms(Whole(), stored.tensors, base(stored)) if stored.norms is None else stored.norms
    return tuple(map(l1_ratio, norms, kept_norms(sparse, stored.tensors, base(stored))))
