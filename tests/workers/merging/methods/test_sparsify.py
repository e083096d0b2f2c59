from __future__ import annotations

import pytest
import torch
from torch import tensor

from workers.merging.masks import hashes, mask_key
from workers.merging.methods.sparsify import cut_both_ends, dropped, magnitude_sampled, match_l1_norm

KEY = mask_key(0, "model", "name")


def test_breadcrumbs_cut_the_largest_and_the_smallest() -> None:
    tau = tensor([1.0, -2.0, 3.0, -4.0, 5.0, -6.0, 7.0, -8.0, 9.0, -10.0])
    assert cut_both_ends(tau.clone(), 0.5, 0.2).tolist() == [0, 0, 0, -4, 5, -6, 7, -8, 0, 0]


def test_breadcrumbs_keep_all_that_equal_the_ends() -> None:
    tau = tensor([1.0, 2.0, 2.0, 3.0, 3.0, 9.0])
    # One is cut off the top, two are kept: 3 and 3; with three, both 2 belong to them.
    assert cut_both_ends(tau.clone(), 0.34, 0.17).tolist() == [0, 0, 0, 3, 3, 0]
    assert cut_both_ends(tau.clone(), 0.5, 0.17).tolist() == [0, 2, 2, 3, 3, 0]


@pytest.mark.parametrize(("density", "gamma", "kept"), [(1.0, 0.0, 10), (0.3, 0.0, 3), (0.01, 0.0, 1), (0.5, 0.5, 5)])
def test_breadcrumbs_keep_their_share(density: float, gamma: float, kept: int) -> None:
    tau = torch.arange(1.0, 11.0)
    assert int((cut_both_ends(tau, density, gamma) != 0).sum()) == kept


def test_dare_keeps_the_elements_whose_hash_is_below_the_density() -> None:
    tau = torch.ones(7, 11)
    kept = (hashes(KEY, 0, 77) < 0.3 * 2**32).view(7, 11)
    assert torch.equal(dropped(tau.clone(), 0.3, KEY), kept.float())


def test_magprune_has_the_probabilities_of_the_paper() -> None:
    # Ranks from the largest: 3 is 0, -2 is 1, 0.5 is 2, 0.1 is 3. Drop probability 0.5 - 0.2 + 0.4 r / 4.
    tau = tensor([[0.5, 3.0, 0.1, -2.0]])
    keep = torch.tensor([[0.5, 0.7, 0.4, 0.6]], dtype=torch.float64)
    for key in range(60):
        kept = hashes(key, 0, 4).view(1, 4) < (keep * 2**32)
        expected = torch.where(kept, tau / keep.float(), 0)
        torch.testing.assert_close(magnitude_sampled(tau.clone(), 0.5, 0.2, key), expected)


def test_magprune_is_symmetric_in_mergekits_form() -> None:
    tau = tensor([[0.5, 3.0, 0.1, -2.0]])
    keep = torch.tensor([[0.5 - 0.2 / 3, 0.7, 0.3, 0.5 + 0.2 / 3]], dtype=torch.float64)
    for key in range(60):
        kept = hashes(key, 0, 4).view(1, 4) < (keep * 2**32)
        result = magnitude_sampled(tau.clone(), 0.5, 0.2, key, is_symmetric=True, rescale=False)
        assert torch.equal(result, torch.where(kept, tau, 0))


def test_magprune_ranks_within_rows_and_a_vector_is_one_row() -> None:
    generator = torch.Generator().manual_seed(0)
    tau = torch.randn(3, 50, generator=generator)
    scales = tensor([[1.0], [1000.0], [0.001]])
    scaled = magnitude_sampled(tau * scales, 0.5, 0.4, KEY)
    torch.testing.assert_close(scaled, magnitude_sampled(tau.clone(), 0.5, 0.4, KEY) * scales)
    flat = tau.flatten()
    assert torch.equal(
        magnitude_sampled(flat.clone(), 0.5, 0.4, KEY), magnitude_sampled(flat.view(1, -1).clone(), 0.5, 0.4, KEY)[0]
    )


def test_magprune_keeps_large_elements_more_often() -> None:
    tau = torch.arange(1.0, 10_001.0)
    kept = magnitude_sampled(tau, 0.5, 0.3, KEY) != 0
    assert kept[:2000].float().mean() == pytest.approx(0.26, abs=0.04)
    assert kept[-2000:].float().mean() == pytest.approx(0.74, abs=0.04)


def test_rescaling_keeps_the_expected_task_vector() -> None:
    tau = torch.ones(40_000)
    assert float(magnitude_sampled(tau.clone(), 0.5, 0.3, KEY).mean()) == pytest.approx(1, abs=0.02)


def test_l1_norm_is_matched_unless_there_is_none() -> None:
    tau = tensor([1.0, -2.0, 3.0])
    assert match_l1_norm(tensor([1.0, 0.0, 3.0]), tau).tolist() == pytest.approx([1.5, 0.0, 4.5])
    nothing = torch.zeros(3)
    assert torch.equal(match_l1_norm(nothing, tau), nothing)
    tiny = tensor([1e-9, 0.0, 0.0])
    assert torch.equal(match_l1_norm(tiny, tiny), tiny)
