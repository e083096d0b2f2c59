"""The kernels' reductions compared with exact sums of float64 terms and, bit by bit, with the plain methods'."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from workers.merging import masks
from workers.merging.kernels import reductions, rules
from workers.merging.methods.arithmetic import BLOCK, CHUNK, dot, inner_products, total
from workers.merging.methods.competition import variance
from workers.merging.methods.sparsify import dropped
from workers.merging.order_statistics import ALL, TieOrder, threshold_of_rank
from workers.merging.statistics import inner_products as fast_inner_products
from workers.merging.statistics import variance_table

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Below, at and above a block, several blocks, and so many that two threads share them.
SIZES = (1, 511, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 513, CHUNK - 1, CHUNK + BLOCK + 1)
# A kernel is compiled for each number of sources, which takes seconds: the same numbers as in `test_kernels`.
NUM_SOURCES = (1, 2, 3, 8)
# The order of `total` adds at most 4 times 7 numbers one after another, with at most 2^-53 of the sum of magnitudes as
# error each; products of two float32 are exact in float64, and the sums of the blocks are added exactly.
ERROR = 28 * 2.0**-53


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tensors_near(size: int, dtypes: Sequence[torch.dtype], seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base of the first dtype, and sources of the other dtypes."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(size, generator=generator)
    sources = [(base + 0.05 * torch.randn(size, generator=generator)).to(dtype) for dtype in dtypes[1:]]
    return base.to(dtypes[0]), sources


def check_sum(found: float, terms: torch.Tensor) -> None:
    """Check that `found` is the sum of the float64 `terms`, up to the error of the order of summation."""
    assert abs(found - math.fsum(terms.flatten().tolist())) <= ERROR * float(terms.abs().sum())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_inner_products_are_the_exact_ones_but_for_the_order(size: int, dtype: torch.dtype) -> None:
    base, (first, second) = tensors_near(size, (dtype,) * 3)
    check_sum(reductions.inner_product(first, second, None), first.double() * second.double())
    taus = [(tensor.float() - base.float()).double() for tensor in (first, second)]
    check_sum(reductions.inner_product(first, second, base), taus[0] * taus[1])
    check_sum(reductions.inner_product(first, first, base), taus[0] ** 2)


@pytest.mark.parametrize("of_gradient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, (torch.bfloat16,) * 3, (torch.float32, torch.bfloat16) * 2])
@pytest.mark.parametrize("size", [1, BLOCK + 1, CHUNK + BLOCK + 1])
def test_projections_are_the_exact_ones_but_for_the_order(
    size: int, dtypes: Sequence[torch.dtype], of_gradient: torch.dtype
) -> None:
    base, sources = tensors_near(size, dtypes)
    gradient = torch.randn(size, generator=torch.Generator().manual_seed(3)).to(of_gradient)
    found = reductions.projections(gradient, sources, base)
    assert len(found) == len(sources)
    for source, product in zip(sources, found, strict=True):
        check_sum(product, gradient.double() * (source.float() - base.float()).double())
    torch.set_num_threads(1)
    assert reductions.projections(gradient, sources, base) == found


@pytest.mark.parametrize("dtypes", [(dtype,) * 4 for dtype in DTYPES] + [(torch.float32, torch.bfloat16) * 2])
def test_inner_products_have_the_bits_of_the_plain_ones(dtypes: tuple[torch.dtype, ...]) -> None:
    for size in SIZES:
        base, sources = tensors_near(size, dtypes)
        assert fast_inner_products(sources) == inner_products(sources)
        assert fast_inner_products(sources, base) == inner_products(sources, base)


def test_inner_products_take_what_the_kernels_do_not() -> None:
    first, second = torch.randn(2, 20, 30, generator=torch.Generator().manual_seed(0))
    assert fast_inner_products((first.T, second.T)) == inner_products((first.T, second.T))
    assert fast_inner_products((first.double(), second.double())) == inner_products((first, second))
    assert fast_inner_products((torch.empty(0), torch.empty(0))) == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.slow
@pytest.mark.parametrize("num_sources", NUM_SOURCES)
def test_squares_of_variable_elements_are_those_of_torch(num_sources: int) -> None:
    for size in SIZES:
        base, sources = tensors_near(size, (torch.float32,) * (num_sources + 1))
        variances = variance(sources, base)
        table, order = variance_table(sources, base, TieOrder(5)), TieOrder(5)
        for rank in {1, (size + 1) // 2, size}:
            by, threshold, squares = reductions.variable_squares(table.trim(rank), order, sources, base)
            assert threshold == threshold_of_rank(variances, rank, order)
            if isinstance(by, rules.ByMagnitude):
                assert int((variances >= by.aboves[0]).sum()) == rank
            is_kept = threshold.reached_by(variances, order)
            assert int(is_kept.sum()) == rank
            taus = [(source - base).masked_fill(~is_kept, 0) for source in sources]
            assert squares == [dot(tau, tau) for tau in taus]
            for square, tau in zip(squares, taus, strict=True):
                check_sum(square, tau.double() ** 2)


@pytest.mark.parametrize("rank", [4001, 4002])
def test_one_of_two_equal_variances_may_be_selected(rank: int) -> None:
    base, sources = tensors_near(5000, (torch.float32,) * 4)
    base, sources = base.repeat(2), [source.repeat(2) for source in sources]
    variances, order = variance(sources, base), TieOrder(5)
    trim = variance_table(sources, base, order).trim(rank)
    assert not trim.is_tied
    by, threshold, squares = reductions.variable_squares(trim, order, sources, base)
    assert isinstance(by, rules.ByMark if rank % 2 else rules.ByMagnitude)
    is_kept = threshold.reached_by(variances, order)
    assert int(is_kept.sum()) == rank
    taus = [(source - base).masked_fill(~is_kept, 0) for source in sources]
    assert squares == [dot(tau, tau) for tau in taus]


@pytest.mark.parametrize("dtype", DTYPES)
def test_squares_are_those_of_stored_tensors(dtype: torch.dtype) -> None:
    base, sources = tensors_near(3 * BLOCK + 513, (dtype,) * 3)
    *_, squares = reductions.variable_squares(ALL, TieOrder(0), sources, base)
    for square, source in zip(squares, sources, strict=True):
        check_sum(square, (source.float() - base.float()).double() ** 2)


@pytest.mark.parametrize("num_sources", NUM_SOURCES)
def test_counts_of_changes_are_exact(num_sources: int) -> None:
    for size in SIZES:
        base, sources = tensors_near(size, (torch.float32,) * (num_sources + 1))
        changed = torch.stack([(source - base).abs() > 0.06 for source in sources])
        is_alone = changed.sum(0) == 1
        expected = [(int(row.sum()), int((row & is_alone).sum())) for row in changed]
        assert reductions.shared_counts(0.06, sources, base) == expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_sources", [1, 3])
def test_norms_of_what_is_kept_are_exact_but_for_the_order(num_sources: int, dtype: torch.dtype) -> None:
    keys = [masks.mask_key(3, f"m{i}", "weight") for i in range(num_sources)]
    k0s, k1s = zip(*map(masks.key_words, keys), strict=True)
    sparse = rules.Dropped(k0s, k1s, (masks.threshold(0.4) - 1,) * num_sources, (1.0,) * num_sources)
    for size in SIZES:
        base, sources = tensors_near(size, (dtype,) * (num_sources + 1))
        found = zip(*(reductions.kept_norms(each, sources, base) for each in (rules.Whole(), sparse)), strict=True)
        for key, source, (whole, kept) in zip(keys, sources, found, strict=True):
            tau = source.float() - base.float()
            left = dropped(tau.clone(), 0.4, key)
            check_sum(whole, tau.double().abs())
            check_sum(kept, left.double().abs())
            assert (whole, kept) == (total(torch.abs, tau), total(torch.abs, left))


@pytest.mark.parametrize("size", SIZES)
def test_checksums_are_those_of_whole_numbers(size: int) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (size,), generator=torch.Generator().manual_seed(0))
    weight = 0x9E3779B97F4A7C15
    expected = sum((word % 2**64) * ((i * weight % 2**64) | 1) for i, word in enumerate(words.tolist())) % 2**64
    assert reductions.weighted_words(words, weight) == expected
