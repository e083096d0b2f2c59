"""Equation numbers are those of Automated Model Merging, section A.2."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from search_spaces.errors import InvalidRecipe
from workers.merging.methods.arithmetic import num_kept
from workers.merging.methods.averages import linear, slerp
from workers.merging.methods.task_vectors import task_arithmetic, ties

BASE = tensor([[1.0, 2.0], [3.0, 4.0]])


def models(count: int, size: int = 400, seed: int = 0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A base and `count` models near it."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(size, generator=generator)
    return base, [base + 0.1 * torch.randn(size, generator=generator) for _ in range(count)]


@pytest.fixture
def all_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_linear_is_the_weighted_average_of_eq_11() -> None:
    first, second = tensor([[1.0, 2.0], [3.0, 4.0]]), tensor([[5.0, 6.0], [7.0, 8.0]])
    assert torch.equal(linear([first, second], [0.25, 0.75]), tensor([[4.0, 5.0], [6.0, 7.0]]))


def test_linear_weights_need_only_be_proportional() -> None:
    first, second = tensor([1.0]), tensor([4.0])
    assert torch.equal(linear([first, second], [1.0, 2.0]), tensor([3.0]))


def test_linear_refuses_weights_that_sum_to_zero() -> None:
    with pytest.raises(InvalidRecipe, match=r"weights \(1.0, -1.0\) sum to 0.0; they must not sum to zero"):
        linear([BASE, BASE], [1.0, -1.0])


def test_task_arithmetic_adds_scaled_task_vectors_as_eq_5() -> None:
    first = BASE + tensor([[1.0, 0.0], [-2.0, 4.0]])
    second = BASE + tensor([[1.0, 2.0], [0.0, -4.0]])
    assert torch.equal(task_arithmetic([first, second], BASE, [0.5, 0.5]), BASE + tensor([[1.0, 1.0], [-1.0, 0.0]]))
    assert torch.equal(task_arithmetic([first, second], BASE, [0.5, 0.25]), BASE + tensor([[0.75, 0.5], [-1.0, 1.0]]))


def test_ties_trims_elects_and_averages_as_eq_6_to_9() -> None:
    # Task vectors; half of each is kept (eq. 6):   [4, -3, 0, 0], [2, 3, 0, 0], [-5, 0, 0, 6]
    # their sums [1, 0, 0, 6] elect the signs (eq. 7): +, none, none, +
    # the mean of those that agree (eq. 8):          (4 + 2) / 2 = 3, 0, 0, 6
    # times lambda = 0.5 (eq. 9):                     1.5, 0, 0, 3
    taus = [tensor([4.0, -3.0, 1.0, 2.0]), tensor([2.0, 3.0, 1.0, -1.0]), tensor([-5.0, 1.0, 2.0, 6.0])]
    base = tensor([10.0, 20.0, 30.0, 40.0])
    merged = ties([base + tau for tau in taus], base, lambda_=0.5, k=0.5)
    assert torch.equal(merged, tensor([11.5, 20.0, 30.0, 43.0]))


def test_ties_keeps_the_base_where_signs_cancel() -> None:
    base = tensor([1.0, 1.0])
    assert torch.equal(ties([base + 2, base - 2], base, lambda_=1.0, k=1.0), base)


def test_ties_elects_signs_by_mass_and_not_by_count() -> None:
    base = torch.zeros(1)
    merged = ties([tensor([1.0]), tensor([1.0]), tensor([-5.0])], base, lambda_=1.0, k=1.0)
    assert torch.equal(merged, tensor([-5.0]))


def test_ties_keeps_its_share() -> None:
    """TIES keeps its share of the magnitudes that equal the smallest kept."""
    base = torch.zeros(5)
    tau = tensor([3.0, -2.0, 2.0, 2.0, 1.0])
    kept = ties([tau], base, lambda_=1.0, k=0.4)
    assert sorted(kept.abs().tolist()) == [0.0, 0.0, 0.0, 2.0, 3.0]
    assert torch.equal(ties([tau], base, lambda_=1.0, k=0.8), tensor([3.0, -2.0, 2.0, 2.0, 0.0]))


@pytest.mark.parametrize(
    ("k", "size", "kept"),
    [(0.5, 4, 2), (0.29, 100, 29), (0.999999, 100, 99), (1.0, 7, 7), (0.1, 5, 1), (0.000001, 3, 1), (0.5, 0, 0)],
)
def test_ties_keeps_the_floor_of_its_share_and_at_least_one(k: float, size: int, kept: int) -> None:
    # int(0.29 * 100) would be 28: the product in binary is 28.999999999999996.
    assert num_kept(k, size) == kept


def test_ties_leaves_a_tensor_that_no_expert_changed() -> None:
    assert torch.equal(ties([BASE, BASE], BASE, lambda_=1.0, k=0.2), BASE)


def test_slerp_follows_eq_10_between_orthogonal_tensors() -> None:
    first, second = tensor([[2.0, 0.0], [0.0, 0.0]]), tensor([[0.0, 0.0], [0.0, 4.0]])
    merged = slerp([first, second], t=1 / 3)
    # omega = 90 degrees: sin 60 of the first, sin 30 of the second.
    expected = tensor([[2 * math.sqrt(3) / 2, 0.0], [0.0, 2.0]])
    torch.testing.assert_close(merged, expected, rtol=1e-6, atol=0)


def test_slerp_between_60_degrees_stays_on_the_circle() -> None:
    first, second = tensor([1.0, 0.0]), tensor([0.5, math.sqrt(3) / 2])
    merged = slerp([first, second], t=0.5)
    torch.testing.assert_close(merged, tensor([math.cos(math.pi / 6), math.sin(math.pi / 6)]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("factor", [1.0001, -1.0])
def test_slerp_of_parallel_tensors(factor: float) -> None:
    """SLERP interpolates linearly between parallel and opposite tensors."""
    merged = slerp([BASE, factor * BASE], t=0.25)
    torch.testing.assert_close(merged, (0.75 + 0.25 * factor) * BASE, rtol=1e-6, atol=0)


def test_slerp_near_its_threshold() -> None:
    """SLERP near its threshold differs little from linear interpolation."""
    angle = math.acos(0.9995) * 1.0001
    first, second = tensor([1.0, 0.0]), tensor([math.cos(angle), math.sin(angle)])
    assert (slerp([first, second], t=0.5) - (first + second) / 2).norm() < 1.3e-4


def test_slerp_takes_a_zero_tensor_as_orthogonal() -> None:
    merged = slerp([BASE, torch.zeros(2, 2)], t=0.5)
    torch.testing.assert_close(merged, BASE * math.sin(math.pi / 4), rtol=1e-6, atol=0)
    assert torch.equal(slerp([torch.zeros(2, 2)] * 2, t=0.5), torch.zeros(2, 2))


def test_slerp_ends_are_the_models_themselves() -> None:
    _, (first, second) = models(2)
    second = -second + 0.3 * first
    assert torch.equal(slerp([first, second], t=0.0), first)
    assert torch.equal(slerp([first, second], t=1.0), second)


def test_coefficient_zero_gives_the_base() -> None:
    base, experts = models(3)
    assert torch.equal(task_arithmetic(experts, base, [0.0] * 3), base)
    assert torch.equal(ties(experts, base, lambda_=0.0, k=0.3), base)


def test_merging_identical_experts_is_merging_one() -> None:
    base, (expert,) = models(1)
    torch.testing.assert_close(linear([expert] * 3, [1 / 3] * 3), expert)
    torch.testing.assert_close(task_arithmetic([expert] * 4, base, [0.25] * 4), expert)
    torch.testing.assert_close(ties([expert] * 3, base, lambda_=1.0, k=1.0), expert)
    torch.testing.assert_close(slerp([expert, expert], t=0.3), expert)
    trimmed = ties([expert], base, lambda_=0.7, k=0.25)
    torch.testing.assert_close(ties([expert] * 3, base, lambda_=0.7, k=0.25), trimmed)
    assert int((trimmed != base).sum()) == 100  # a quarter of 400


@given(st.permutations(range(3)))
def test_the_order_of_experts_matters_only_in_the_last_bits(order: list[int]) -> None:
    base, experts = models(3)
    weights = [0.2, 0.3, 0.5]
    shuffled, shuffled_weights = [experts[i] for i in order], [weights[i] for i in order]
    torch.testing.assert_close(linear(shuffled, shuffled_weights), linear(experts, weights))
    torch.testing.assert_close(
        task_arithmetic(shuffled, base, shuffled_weights), task_arithmetic(experts, base, weights)
    )
    torch.testing.assert_close(
        ties(shuffled, base, lambda_=0.6, k=0.4), ties(experts, base, lambda_=0.6, k=0.4), rtol=1e-5, atol=1e-6
    )


@given(st.floats(0, 1), st.floats(0.1, 0.99), st.integers(1, 4))
def test_ties_agrees_with_its_definition_element_by_element(lambda_: float, k: float, count: int) -> None:
    base, experts = models(count, size=24)
    merged = ties(experts, base, lambda_=lambda_, k=k)
    taus = [(expert - base).tolist() for expert in experts]
    kept = num_kept(k, 24)
    trimmed = [
        [value if abs(value) >= sorted(map(abs, tau), reverse=True)[kept - 1] else 0.0 for value in tau] for tau in taus
    ]
    for i, column in enumerate(zip(*trimmed, strict=True)):
        agreeing = [value for value in column if value * sum(column) > 0]
        mean = sum(agreeing) / len(agreeing) if agreeing else 0.0
        assert float(merged[i]) == pytest.approx(float(base[i]) + lambda_ * mean, abs=1e-6)


def test_the_number_of_threads_does_not_change_a_bit(all_threads: None) -> None:
    base, experts = models(3, size=300_001)
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        results.append(
            [
                linear(experts, [0.2, 0.3, 0.5]),
                task_arithmetic(experts, base, [0.4, 0.3, 0.2]),
                ties(experts, base, lambda_=0.5, k=0.3),
                slerp([experts[0], experts[1].flip(0)], t=0.3),
            ]
        )
    for one, other in itertools.pairwise(results):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
