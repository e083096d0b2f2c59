"""Kernel rules of SCE, RAM and consensus masks."""

from __future__ import annotations

from search_spaces.recipe import Merge
from workers.merging.kernels.lowering.base import base, fuses, trimmed
from workers.merging.kernels.rules import Agreed, Comparison, Rule, SharedOut, Variable, VariableElection, Whole
from workers.merging.methods.competition import (
    NO_SQUARES,
    num_selected,
    ramplus_factor,
    sce_mergekit_weights,
    sce_weights,
)
from workers.merging.methods.plain import Operands
from workers.merging.order_statistics import ALL, NOTHING

__all__: list[str] = []


@fuses("sce")
def _sce(merge: Merge, stored: Operands) -> Rule:
    selected, squares = _variable_squares(merge, stored)
    return Variable(*selected, tuple(sce_weights(squares)))


@fuses("sce_mergekit")
def _sce_mergekit(merge: Merge, stored: Operands) -> Rule:
    selected, squares = _variable_squares(merge, stored)
    weights = sce_mergekit_weights(squares, stored.tensors[0].numel())
    return VariableElection(*selected, tuple(weights), NO_SQUARES)


@fuses("ram", is_on_cuda=True)
def _ram(merge: Merge, stored: Operands) -> Rule:
    return SharedOut(merge.number("epsilon"), (1.0,) * len(stored.tensors))


@fuses("ramplus_tl")
def _ramplus_tl(merge: Merge, stored: Operands) -> Rule:
    from workers.merging.kernels.reductions import shared_counts

    r, alpha, epsilon = merge.number("r"), merge.number("alpha"), merge.number("epsilon")
    counts = shared_counts(epsilon, stored.tensors, base(stored))
    return SharedOut(epsilon, tuple(ramplus_factor(r, alpha, changed, alone) for changed, alone in counts))


@fuses("consensus_ta")
def _consensus_ta(merge: Merge, stored: Operands) -> Rule:
    return Agreed(Whole(), merge.number("lambda"), merge.per_source("mask_lambda"), merge.number("agreement"))


@fuses("consensus_ties")
def _consensus_ties(merge: Merge, stored: Operands) -> Rule:
    sparse = trimmed(stored, [merge.number("k")] * len(stored.tensors))
    return Agreed(sparse, merge.number("lambda"), merge.per_source("mask_lambda"), merge.number("agreement"))


def _variable_squares(merge: Merge, stored: Operands) -> tuple[tuple[Comparison, float, int, int], list[float]]:
    """Find the variance threshold of the method SCE, and sum the squares of each task vector's selected elements.

    SCE (arXiv:2408.07990) selects the elements with the largest variance between the task vectors. `merge` has the
    share to select, and `stored` has the operands with their statistics. The first result describes the threshold, in
    the form of the first four fields of the kernel rules `Variable` and `VariableElection`:

    - how variances are compared with the threshold: by variance and mark (class `ByMark`), or by variance alone (class
      `ByMagnitude`)
    - the variance of the threshold
    - the mark of the threshold, a number that orders elements of equal variance
    - the factor by which hashes of the elements' indices are multiplied to give their marks

    The second result has a sum of squares for each source.
    """
    from workers.merging.kernels.reductions import variable_squares

    select_topk, table = merge.number("select_topk"), stored.variances
    assert table is not None, f"{merge.method} was not given the variances"
    assert stored.order is not None, f"{merge.method} was not given the order of equal variances"
    count = num_selected(select_topk, table.num_not_zero)
    trim = ALL if select_topk == 1 else table.trim(count) if count else NOTHING
    by, threshold, squares = variable_squares(trim, stored.order, stored.tensors, base(stored))
    return (by, threshold.magnitude, threshold.mark, stored.order.factor), squares
