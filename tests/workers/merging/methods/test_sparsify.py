from __future__ import annotations

import itertools

import pytest
import torch
from torch import tensor

from workers.merging.masks import hashes, mask_key
from workers.merging.methods.arithmetic import num_kept
from workers.merging.methods.sparsify import cut_both_ends, dropped, magnitude_sampled, match_l1_norm, trimmed
from workers.merging.order_statistics import TieOrder

KEY = mask_key(0, "model", "name")
ORDER = TieOrder(mask_key(-1, "model", "name"))
FORMAT_1 = TieOrder(0, keeps_equal=True)


def test_breadcrumbs_cut_the_largest_and_the_smallest() -> None:
    tau = tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0, 9.0, -10.0])
    assert cut_both_ends(tau.clone(), 0.5, 0.2, ORDER).tolist() == [0, 0, 0, -4, 5, -6, 7, -8, 0, 0]


def test_breadcrumbs_of_format_1_keep_all_that_equal_the_ends() -> None:
    tau = tensor([1.0, 2.0, 2.0, 3.0, 3.0, 9.0])
    # One is cut off the top, two are kept: 3 and 3; with three, both 2 belong to them.
    assert cut_both_ends(tau.clone(), 0.34, 0.17, FORMAT_1).tolist() == [0, 0, 0, 3, 3, 0]
    assert cut_both_ends(tau.clone(), 0.5, 0.17, FORMAT_1).tolist() == [0, 2, 2, 3, 3, 0]
    kept = cut_both_ends(tau.clone(), 0.5, 0.17, ORDER)
    assert sorted(kept.tolist()) == [0, 0, 0, 2, 3, 3]


def coarse(size: int, num_distinct: int = 9) -> torch.Tensor:
    """Random values of few distinct magnitudes, as in bfloat16."""
    generator = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=generator).mul_(num_distinct / 3).round().div_(num_distinct)


@pytest.mark.parametrize("size", [1, 2, 77, 12_345])
@pytest.mark.parametrize("k", [0.0001, 0.2, 0.5, 0.777])
def test_a_density_keeps_its_share_of_equal_magnitudes_exactly(size: int, k: float) -> None:
    tau = coarse(size) + 10  # no zeros, which could not be told from dropped ones
    for key in range(3):
        kept = trimmed(tau.clone(), k, TieOrder(key)) != 0
        assert int(kept.sum()) == num_kept(k, size)
        assert not size - int(kept.sum()) or tau[kept].min() >= tau[~kept].max()


def test_equal_magnitudes_have_no_position() -> None:
    """Equal magnitudes are kept repeatably, without preference for a position."""
    tau = torch.ones(20_000)
    masks = [trimmed(tau.clone(), 0.3, TieOrder(key)) != 0 for key in range(20)]
    assert all(int(mask.sum()) == 6000 for mask in masks)
    assert torch.equal(masks[7], trimmed(tau.clone(), 0.3, TieOrder(7)) != 0)
    # The share of the first half, of even positions, and of one block: 0.3 within 5 standard errors of 20 draws.
    for places in (slice(0, 10_000), slice(0, None, 2), slice(512, 1024)):
        share = float(torch.stack([mask[places] for mask in masks]).float().mean())
        count = 20 * len(tau[places])
        assert share == pytest.approx(0.3, abs=5 * (0.3 * 0.7 / count) ** 0.5)
    # Two models with keys of their own keep the same position as often as by chance.
    both = torch.stack([first & second for first, second in itertools.pairwise(masks)]).float().mean()
    assert float(both) == pytest.approx(0.09, abs=0.005)


def test_format_1_keeps_equal_magnitudes() -> None:
    """Format 1 keeps all magnitudes equal to the smallest kept."""
    tau = tensor([1.0, -2.0, 2.0, 2.0, 3.0])
    assert trimmed(tau.clone(), 0.4, FORMAT_1).tolist() == [0, -2, 2, 2, 3]
    assert int((trimmed(tau.clone(), 0.4, ORDER) != 0).sum()) == 2


def test_magprune_of_equal_magnitudes() -> None:
    """MagPrune ranks equal magnitudes without preference for a position."""
    tau = torch.ones(400, 50)
    kept = [magnitude_sampled(tau.clone(), 0.5, 0.5, key, TieOrder(key + 1)) != 0 for key in range(10)]
    shares = torch.cat(kept).float().mean(dim=0)  # by column, of 4,000 each
    assert float(shares.min()) > 0.5 - 5 * (0.25 / 4000) ** 0.5
    assert float(shares.max()) < 0.5 + 5 * (0.25 / 4000) ** 0.5
    by_position = magnitude_sampled(tau.clone(), 0.5, 0.5, KEY, FORMAT_1) != 0
    assert float(by_position[:, 0].float().mean()) < 0.1, "the first of a row was the smallest"


@pytest.mark.parametrize(
    ("density", "gamma", "kept"), [(1.0, 0.0, 10), (0.3, 0.0, 3), (0.5, 0.5, 5), (0.09, 0.0, 0), (0.09, 0.5, 0)]
)
def test_breadcrumbs_keep_their_share(density: float, gamma: float, kept: int) -> None:
    tau = torch.arange(1.0, 11.0)
    assert int((cut_both_ends(tau, density, gamma, ORDER) != 0).sum()) == kept


def test_dare_keeps_the_elements_whose_hash_is_below_the_density() -> None:
    tau = torch.ones(7, 11)
    kept = (hashes(KEY, torch.arange(77)) < 0.3 * 2**32).view(7, 11)
    assert torch.equal(dropped(tau.clone(), 0.3, KEY), kept.float())


def test_magprune_has_the_probabilities_of_the_paper() -> None:
    # Ranks from the largest: 3 is 0, -2 is 1, 0.5 is 2, 0.1 is 3. Drop probability 0.5 - 0.2 + 0.4 r / 4.
    tau = tensor([[0.5, 3.0, 0.1, -2.0]])
    keep = torch.tensor([[0.5, 0.7, 0.4, 0.6]], dtype=torch.float64)
    for key in range(60):
        kept = hashes(key, torch.arange(4)).view(1, 4) < (keep * 2**32)
        expected = torch.where(kept, tau / keep.float(), 0)
        torch.testing.assert_close(magnitude_sampled(tau.clone(), 0.5, 0.2, key, ORDER), expected)


def test_magprune_is_symmetric_in_mergekits_form() -> None:
    tau = tensor([[0.5, 3.0, 0.1, -2.0]])
    keep = torch.tensor([[0.5 - 0.2 / 3, 0.7, 0.3, 0.5 + 0.2 / 3]], dtype=torch.float64)
    for key in range(60):
        kept = hashes(key, torch.arange(4)).view(1, 4) < (keep * 2**32)
        result = magnitude_sampled(tau.clone(), 0.5, 0.2, key, ORDER, is_symmetric=True, rescale=False)
        assert torch.equal(result, torch.where(kept, tau, 0))


def test_magprune_ranks_within_rows_and_a_vector_is_one_row() -> None:
    generator = torch.Generator().manual_seed(0)
    tau = torch.randn(3, 50, generator=generator)
    scales = tensor([[1.0], [1000.0], [0.001]])
    scaled = magnitude_sampled(tau * scales, 0.5, 0.4, KEY, ORDER)
    torch.testing.assert_close(scaled, magnitude_sampled(tau.clone(), 0.5, 0.4, KEY, ORDER) * scales)
    flat = tau.flatten()
    assert torch.equal(
        magnitude_sampled(flat.clone(), 0.5, 0.4, KEY, ORDER),
        magnitude_sampled(flat.view(1, -1).clone(), 0.5, 0.4, KEY, ORDER)[0],
    )


def test_magprune_keeps_large_elements_more_often() -> None:
    tau = torch.arange(1.0, 10_001.0)
    kept = magnitude_sampled(tau, 0.5, 0.3, KEY, ORDER) != 0
    assert kept[:2000].float().mean() == pytest.approx(0.26, abs=0.04)
    assert kept[-2000:].float().mean() == pytest.approx(0.74, abs=0.04)


def test_rescaling_keeps_the_expected_task_vector() -> None:
    tau = torch.ones(40_000)
    assert float(magnitude_sampled(tau.clone(), 0.5, 0.3, KEY, ORDER).mean()) == pytest.approx(1, abs=0.02)


def test_l1_norm_is_matched_unless_there_is_none() -> None:
    tau = tensor([1.0, -2.0, 3.0])
    assert match_l1_norm(tensor([1.0, 0.0, 3.0]), tau).tolist() == pytest.approx([1.5, 0.0, 4.5])
    nothing = torch.zeros(3)
    assert torch.equal(match_l1_norm(nothing, tau), nothing)
    tiny = tensor([1e-9, 0.0, 0.0])
    assert torch.equal(match_l1_norm(tiny, tiny), tiny)
