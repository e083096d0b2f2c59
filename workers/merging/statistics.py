"""Statistics of the source models' tensors that are computed once for many merges: inner products, ranks, thresholds.

Kernels compute them for tensors on CPU. Without these statistics, the plain methods compute the same numbers in torch,
bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from workers.merging.kernels.rules import Whole
from workers.merging.methods import fusions
from workers.merging.methods.arithmetic import Products, total
from workers.merging.methods.arithmetic import inner_products as plain_inner_products
from workers.merging.methods.competition import variance
from workers.merging.methods.fusions import Importance
from workers.merging.methods.sparsify import row_width
from workers.merging.order_statistics import LARGEST_MARK, MagnitudeTable, Ranked, TieOrder, magnitude_keys

__all__ = [
    "importance_of",
    "inner_products",
    "magnitude_selection",
    "magnitude_table",
    "norm_of",
    "row_ranks",
    "variance_selection",
    "variance_table",
]

# The kernels are imported in the functions: Numba takes a second to import, and opening a family needs no statistics.


def inner_products(tensors: Sequence[torch.Tensor], base: torch.Tensor | None = None) -> Products:
    """Inner products [N, N] of all pairs of N tensors or, with `base`, of their differences from the base.

    On CPU, a kernel computes the same bits as the function `methods.arithmetic.inner_products`.
    """
    if tensors[0].device.type != "cpu" or tensors[0].numel() == 0:
        return plain_inner_products(tensors, base)
    from workers.merging.kernels.reductions import inner_product

    given = [(tensor.float() if tensor.dtype == torch.float64 else tensor).contiguous() for tensor in tensors]
    products = [[0.0] * len(given) for _ in given]
    for i, first in enumerate(given):
        for j, second in enumerate(given[: i + 1]):
            products[i][j] = products[j][i] = inner_product(first, second, base)
    return products


def importance_of(first: torch.Tensor, second: torch.Tensor) -> Importance:
    """The rule by which the method Arcee Fusion selects elements of `second`: row factors and a threshold.

    The importance of an element is |second - first|, times the factor of its row. Elements whose importance is at least
    the threshold are taken from `second`, all others from `first`. The result equals the result of the function
    `methods.fusions.importance_of`, but is computed with little memory. The tensors are on CPU and have at least one
    element.
    """
    return fusions.importance_of(first, second, _importances_at)


def magnitude_table(source: torch.Tensor, base: torch.Tensor, order: TieOrder) -> MagnitudeTable:
    """Make the table from which the n-th largest of the magnitudes |source - base| (float32) is found, for any n.

    `order` is the rule that breaks ties between equal magnitudes. The tensors have at least one element.
    """
    if source.is_cuda or source.numel() >= 2**32:
        return MagnitudeTable.of_ascending([_sorted((source.float() - base.float()).abs_(), order)])
    from workers.merging.kernels.sorting import ascending_magnitudes

    return MagnitudeTable.of_ascending(ascending_magnitudes(source, base, order.factor))


def magnitude_selection(source: torch.Tensor, base: torch.Tensor, order: TieOrder) -> Ranked:
    """Make an object that finds the n-th largest of the magnitudes |source - base|, for any n.

    Magnitudes are in float32. For tensors on a GPU, or with 2^32 elements or more, the object is a table that is
    computed once (function `magnitude_table`). For other tensors nothing is computed in advance; the object searches
    all magnitudes at each call. `order` is the rule that breaks ties between equal magnitudes. The tensors have at
    least one element.
    """
    if source.is_cuda or source.numel() >= 2**32:
        return magnitude_table(source, base, order)
    from workers.merging.kernels.sorting import selected_magnitudes

    return selected_magnitudes(source, base, order.factor)


def variance_selection(sources: Sequence[torch.Tensor], base: torch.Tensor, order: TieOrder) -> Ranked:
    """Make an object that finds the n-th largest of the elements' variances across task vectors for any n.

    The variance of an element is computed over its values in the task vectors, the differences of `sources` from
    `base`. The n-th largest variance is the threshold by which the merge method SCE selects elements. For tensors on a
    GPU, or with 2^32 elements or more, the object is a table that is computed once (function `variance_table`). For
    other tensors nothing is computed in advance; the object searches all variances at each call. `order` is the rule
    that breaks ties between equal variances. The tensors have at least one element.
    """
    if base.is_cuda or base.numel() >= 2**32:
        return variance_table(sources, base, order)
    from workers.merging.kernels.sorting import selected_variances

    return selected_variances(sources, base, order.factor)


def variance_table(sources: Sequence[torch.Tensor], base: torch.Tensor, order: TieOrder) -> MagnitudeTable:
    """Make the table from which the n-th largest of the elements' variances across task vectors is found, for any n.

    The n-th largest variance is the threshold by which the merge method SCE selects elements. The variance of an
    element is computed over its values in the task vectors, the differences of `sources` from `base` (function
    `methods.competition.variance`). `order` is the rule that breaks ties between equal variances. The tensors have at
    least one element.
    """
    if base.is_cuda or base.numel() >= 2**32:
        return MagnitudeTable.of_ascending([_sorted(variance(sources, base), order)])
    from workers.merging.kernels.sorting import ascending_variances

    return MagnitudeTable.of_ascending(ascending_variances(sources, base, order.factor))


def norm_of(source: torch.Tensor, base: torch.Tensor) -> float:
    """L1 norm of a task vector: the sum of |source - base| over a tensor, with differences rounded to float32."""
    if base.is_cuda or base.numel() == 0:
        return total(torch.abs, source.float() - base.float())
    from workers.merging.kernels.reductions import kept_norms

    return kept_norms(Whole(), [source.contiguous()], base.contiguous())[0]


def row_ranks(source: torch.Tensor, base: torch.Tensor, order: TieOrder) -> torch.Tensor:
    """Rank of each magnitude |source - base| within its row of the tensor, from 0 for the smallest.

    `order` is the rule that breaks ties between equal magnitudes. The tensors are on CPU. The ranks have the tensors'
    shape; they are uint16 in rows of up to 65536 elements, else int32.
    """
    from workers.merging.kernels.sorting import ranks_in_rows

    ranks = torch.empty(source.shape, dtype=torch.uint16 if row_width(source) <= 2**16 else torch.int32)
    ranks_in_rows(source, base, order.factor, ranks, row_width(source))
    return ranks


def _importances_at(
    indices: Sequence[int], first: torch.Tensor, second: torch.Tensor, rows: torch.Tensor
) -> list[torch.Tensor]:
    """Find the importances at given `indices` in the ascending list of the importances of all elements.

    The importance of an element is the absolute difference of `first` and `second`, times the factor of its row in
    `rows`. The merge method Arcee Fusion takes elements of high importance from the second model. The result contains a
    tensor with one number for each of `indices`; index 0 is the smallest importance. The importances are sorted in
    pieces, which needs little memory.
    """
    from workers.merging.kernels.sorting import ascending_importances

    found: dict[int, torch.Tensor] = {}
    before = 0
    for piece in ascending_importances(first, second, rows):
        found |= {at: torch.tensor(piece[at - before]) for at in indices if before <= at < before + len(piece)}
        before += len(piece)
    return [found[index] for index in indices]


def _sorted(numbers: torch.Tensor, order: TieOrder) -> tuple[np.ndarray, np.ndarray]:
    keys = magnitude_keys(numbers.flatten(), order).sort().values.cpu()
    return (keys >> 32).int().view(torch.float32).numpy(), (keys & LARGEST_MARK).numpy().astype(np.uint32)
