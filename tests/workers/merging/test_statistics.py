"""Statistics by the kernels are those that the plain methods compute for themselves, bit for bit."""

from __future__ import annotations

import pytest
import torch

from workers.merging import statistics
from workers.merging.methods import averages
from workers.merging.methods.arithmetic import cosine, cosine_of
from workers.merging.methods.competition import variance
from workers.merging.order_statistics import TieOrder

ORDER = TieOrder(11)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=generator)
    return first.to(dtype), (first + 0.05 * torch.randn(shape, generator=generator)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1,), (5,), (7, 43), (301, 499), (3, 4, 511)])
def test_importance_and_cosine_have_the_bits_of_the_plain_ones(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    first, second = pair(shape, dtype)
    found, expected = statistics.importance_of(first, second), averages.importance_of(first, second)
    assert torch.equal(found.rows, expected.rows)
    assert found.threshold == expected.threshold
    assert cosine_of(statistics.inner_products((first, second)), 0, 1) == cosine(first, second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tables_find_every_rank_of_magnitudes_and_variances(dtype: torch.dtype) -> None:
    base, source = pair((9, 111), dtype)
    tau = source.float() - base.float()
    ordered = tau.abs().flatten().sort(descending=True).values
    table = statistics.magnitude_table(source, base, ORDER)
    variances = variance([source, base * 2], base)
    spread = variances.flatten().sort(descending=True).values
    variance_table = statistics.variance_table([source, base * 2], base, ORDER)
    for rank in range(1, tau.numel() + 1):
        assert table.place(rank, tau.abs(), ORDER).magnitude == ordered[rank - 1]
        assert variance_table.place(rank, variances, ORDER).magnitude == spread[rank - 1]
