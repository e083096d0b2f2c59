from __future__ import annotations

import torch
from torch import tensor

from workers.merging.methods import fusions


def test_nearswap_moves_each_element_by_at_most_t() -> None:
    merged = fusions.nearswap([tensor([0.0, 0.0, 5.0]), tensor([0.25, -8.0, 5.0])], t=0.5)
    assert merged.tolist() == [0.25, -0.5, 5.0]


def test_nearswap_ends_are_the_models_themselves() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 50, generator=generator)
    assert torch.equal(fusions.nearswap([first, second], t=0.0), first)
    assert torch.equal(fusions.nearswap([first, second], t=100.0), second)


def test_arcee_fusion_takes_over_the_outliers_of_importance() -> None:
    generator = torch.Generator().manual_seed(0)
    first = torch.randn(6, 8, generator=generator)
    second = first + 0.01 * torch.randn(6, 8, generator=generator)
    second[2, 3] += 2.0
    p, q = second.double().softmax(-1), first.double().softmax(-1)
    importance = (second - first).abs() * (p * (p / q).log()).sum(-1, keepdim=True)
    ranked = importance.flatten().sort().values
    threshold = ranked[23] + 1.5 * (ranked[35] - ranked[11])  # floor(q * 47)
    merged = fusions.arcee_fusion([first, second])
    torch.testing.assert_close(merged, torch.where(importance >= threshold, second, first))
    assert (merged != first).sum() < 12
