from __future__ import annotations

import pytest
import torch
from torch import Tensor, tensor

from workers.merging.methods import competition

BASE = tensor([10.0, 20.0, 30.0, 40.0])


def near(*taus: list[float]) -> list[Tensor]:
    return [BASE + tensor(tau) for tau in taus]


def delta(merged: Tensor) -> list[float]:
    return [round(float(x), 4) for x in merged - BASE]


def test_sce_weighs_by_mean_square_and_erases_the_minority() -> None:
    experts = near([2.0, 2.0, 0.0, 2.0], [1.0, -1.0, 0.0, 1.0])
    # Squares 12 and 3: weights 0.8 and 0.2. In the second, + is elected.
    assert delta(competition.sce(experts, BASE, select_topk=1.0)) == [1.8, 2.0, 0.0, 1.8]


def test_sce_of_mergekit() -> None:
    """Mergekit's SCE weighs small task vectors equally and elects plus where signs cancel."""
    large = near([2.0, 2.0, 0.0, 1.0], [1.0, -1.0, 0.0, -1.0])
    # Squares 9 and 3: weights 0.75 and 0.25; in the last, where the sum is zero, + is elected.
    assert delta(competition.sce_mergekit(large, BASE, select_topk=1.0)) == [1.75, 2.0, 0.0, 1.0]
    zero = torch.zeros(4)
    small = [zero + 3e-4, zero + 1e-4]
    assert competition.sce_mergekit(small, zero, select_topk=1.0).tolist() == pytest.approx([2e-4] * 4)


def test_sce_selects_where_task_vectors_vary_most() -> None:
    experts = near([2.0, 5.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    # Variances 0.25, 4, 0, 0: half of the two that vary is the second; squares 25 and 1.
    assert delta(competition.sce(experts, BASE, select_topk=0.5)) == [0.0, pytest.approx(126 / 26, abs=1e-3), 0.0, 0.0]
    assert delta(competition.sce(experts, BASE, select_topk=0.3)) == [0.0, 0.0, 0.0, 0.0]


def test_ram_adds_what_one_changed_and_averages_what_several_did() -> None:
    experts = near([2.0, 1.0, 0.0, 1e-6], [0.0, 3.0, 0.0, 0.5])
    assert delta(competition.ram(experts, BASE, epsilon=1e-5)) == [2.0, 2.0, 0.0, 0.5]


def test_ramplus_raises_own_changes_by_how_much_is_shared() -> None:
    experts = near([2.0, 1.0, 4.0, 0.0], [0.0, 3.0, 0.0, 0.0])
    # The first changed one element with the other and two alone: 1 + 0.4 * min(1, 1 / 2).
    merged = competition.ramplus_tl(experts, BASE, r=0.4, alpha=1.0, epsilon=1e-5)
    assert delta(merged) == [2.4, 2.0, 4.8, 0.0]
    clipped = competition.ramplus_tl(experts, BASE, r=0.4, alpha=0.25, epsilon=1e-5)
    assert delta(clipped) == [2.2, 2.0, 4.4, 0.0]


def unit_range(values: Tensor) -> Tensor:
    return (values - values.min()) / (values.max() - values.min())


def test_pcb_follows_its_equations() -> None:
    base = torch.zeros(30)
    taus = torch.randn(3, 30, generator=torch.Generator().manual_seed(0))
    exact = taus.double()
    betas = []
    for tau in exact:
        within = torch.softmax(3 * unit_range(tau * tau), 0)
        between = sum(torch.softmax(unit_range(tau * other), 0) for other in exact)
        beta = within * between
        betas.append(torch.where(beta >= beta.sort().values[30 - 9], beta, 0))
    weights = torch.stack(betas)
    expected = (weights * exact).sum(0) / weights.sum(0).clamp(min=1e-30)
    merged = competition.pcb(list(taus), base, lambda_=1.3, density=0.3)
    torch.testing.assert_close(merged, 1.3 * expected.float(), rtol=1e-4, atol=1e-6)


def test_pcb_as_coded_follows_its_steps() -> None:
    base = torch.zeros(30)
    taus = torch.randn(3, 30, generator=torch.Generator().manual_seed(1))
    exact = taus.double()
    scales, clipped = [], []
    for tau in exact:
        sizes = tau.abs().clamp(tau.abs().sort().values[0], tau.abs().sort().values[28])
        score = torch.exp(3 * unit_range(sizes) ** 2) * torch.tanh(tau * exact.sum(0))
        scales.append(unit_range(score.clamp(min=score.sort().values[21])))
        clipped.append(tau.sign() * sizes)
    weights = torch.stack(scales)
    expected = (weights * torch.stack(clipped)).sum(0) / weights.sum(0).clamp(min=1e-12)
    merged = competition.pcb_tanh(list(taus), base, lambda_=1.2, density=0.3)
    torch.testing.assert_close(merged, 1.2 * expected.float(), rtol=1e-4, atol=1e-5)


def test_consensus_keeps_what_matters_to_enough_models() -> None:
    experts = near([1.0, 4.0, 0.0, 2.0], [1.0, 0.5, 0.0, -2.0])
    # The sum is [2, 4.5, 0, 0]. |tau_t| >= 0.5 |sum - tau_t|:
    # first 1 >= 0.5, 4 >= 0.25, 0 >= 0, 2 >= 1; second 1 >= 0.5, 0.5 < 2, 0 >= 0, 2 >= 1.
    both = competition.consensus_ta(experts, BASE, lambda_=0.5, mask_lambdas=[0.5, 0.5], agreement=2)
    assert delta(both) == [1.0, 0.0, 0.0, 0.0]
    one = competition.consensus_ta(experts, BASE, lambda_=0.5, mask_lambdas=[0.5, 0.5], agreement=1)
    assert delta(one) == [1.0, 2.25, 0.0, 0.0]
    lenient = competition.consensus_ta(experts, BASE, lambda_=0.5, mask_lambdas=[0.5, 0.1], agreement=2)
    assert delta(lenient) == [1.0, 2.25, 0.0, 0.0]


def test_consensus_of_ties_masks_what_ties_merges() -> None:
    experts = near([1.0, 4.0, 0.0, 2.0], [3.0, -1.0, 0.0, -2.0])
    # TIES merges to [2, 4, 0, 0]; |tau_t| >= 0.5 |merged - tau_t|: first 1 >= 0.5, 4 >= 0; second 3 >= 0.5, 1 < 2.5.
    merged = competition.consensus_ties(experts, BASE, lambda_=1.0, k=1.0, mask_lambdas=[0.5, 0.5], agreement=2)
    assert delta(merged) == [2.0, 0.0, 0.0, 0.0]


def test_wudi_takes_the_steps_of_adam_on_its_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    base = torch.randn(5, 7, generator=generator)
    taus = torch.randn(3, 5, 7, generator=generator)
    merged = competition.wudi([base + tau for tau in taus], base, lambda_=0.8, steps=20, learning_rate=0.01)
    vector = torch.nn.Parameter(taus.sum(0))
    adam = torch.optim.Adam([vector], lr=0.01)
    for _ in range(20):
        adam.zero_grad()
        product = (vector.unsqueeze(0) - taus) @ taus.transpose(1, 2)
        (product.square().sum((1, 2)) / taus.square().sum((1, 2))).sum().backward()
        adam.step()
    torch.testing.assert_close(merged, base + 0.8 * vector.detach(), rtol=1e-4, atol=1e-5)


def test_wudi_averages_task_vectors_that_are_no_matrices() -> None:
    experts = near([1.0, 2.0, 3.0, 4.0], [3.0, 2.0, 1.0, 0.0])
    assert delta(competition.wudi(experts, BASE, lambda_=0.5, steps=300, learning_rate=1e-5)) == [1.0] * 4
