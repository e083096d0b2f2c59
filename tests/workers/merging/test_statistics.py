"""The kernels' statistics equal, bit for bit, the statistics that the plain methods compute themselves."""

from __future__ import annotations

import pytest
import torch

from workers.merging import order_statistics, statistics
from workers.merging.methods import fusions
from workers.merging.methods.arithmetic import cosine, cosine_of
from workers.merging.methods.competition import variance
from workers.merging.order_statistics import Selection, TieOrder

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
    found, expected = statistics.importance_of(first, second), fusions.importance_of(first, second)
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
        assert table.threshold(rank, tau.abs(), ORDER).magnitude == ordered[rank - 1]
        assert variance_table.threshold(rank, variances, ORDER).magnitude == spread[rank - 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("few", [1, 40, 1 << 20])
def test_selection_finds_the_places_that_tables_find(
    dtype: torch.dtype, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workers.merging.kernels import threads

    monkeypatch.setattr(order_statistics, "FEW", few)
    monkeypatch.setattr(threads, "MIN_PIECE", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    base, source = pair((9, 111), dtype)
    source[3:5] = base[3:5]
    source[6] = base[6] + 0.125  # equal magnitudes
    sizes = (source.float() - base.float()).abs()
    table = statistics.magnitude_table(source, base, ORDER)
    selection = statistics.magnitude_selection(source, base, ORDER)
    assert isinstance(selection, Selection)
    sources = [source, base * 2, source + base]
    of_variances = statistics.variance_table(sources, base, ORDER), statistics.variance_selection(sources, base, ORDER)
    assert selection.num_not_zero == table.num_not_zero == int(sizes.count_nonzero())
    assert of_variances[1].num_not_zero == of_variances[0].num_not_zero
    for rank in (1, 2, 128, 129, 300, 500, 777, 998, 999):
        exact = selection.trim(rank)
        assert exact.low == exact.high == table.threshold(rank, sizes, ORDER)
        assert selection.select(sizes.numel() - rank).num_equal == int((sizes == exact.high.magnitude).sum())
        spread = variance(sources, base)
        assert of_variances[1].threshold(rank, spread, ORDER) == of_variances[0].threshold(rank, spread, ORDER)
