"""Kernel rules of sums of task vectors, and of TIES in its variants."""

from __future__ import annotations

from search_spaces.recipe import Merge
from workers.merging.kernels.lowering.base import fuses, trimmed
from workers.merging.kernels.rules import (
    AgreeingSum,
    Interpolation,
    Mean,
    Rule,
    Sum,
    Trimmed,
    Weighted,
    WeightedMean,
    Whole,
)
from workers.merging.methods.plain import Operands

__all__: list[str] = []


@fuses("task_arithmetic", is_on_cuda=True)
def _task_arithmetic(merge: Merge, stored: Operands) -> Rule:
    return Sum(Whole(), merge.per_source("lambda"))


@fuses("ties", is_on_cuda=True)
def _ties(merge: Merge, stored: Operands) -> Rule:
    return Mean(_largest(merge, stored), merge.number("lambda"))


@fuses("ties_sum")
def _ties_sum(merge: Merge, stored: Operands) -> Rule:
    return AgreeingSum(_largest(merge, stored), merge.number("lambda"))


@fuses("ties_weighted")
def _ties_weighted(merge: Merge, stored: Operands) -> Rule:
    sparse = trimmed(stored, merge.per_source("density"))
    return Weighted(sparse, merge.per_source("weight"), merge.number("lambda"), merge.number("normalize"))


@fuses("ties_peft")
def _ties_peft(merge: Merge, stored: Operands) -> Rule:
    return WeightedMean(trimmed(stored, merge.per_source("density")), merge.per_source("weight"))


@fuses("m3_ties")
def _m3_ties(merge: Merge, stored: Operands) -> Rule:
    return Interpolation(_largest(merge, stored), merge.per_source("weight"), merge.number("lambda"))


def _largest(merge: Merge, stored: Operands) -> Trimmed:
    return trimmed(stored, [merge.number("k")] * len(stored.tensors))
