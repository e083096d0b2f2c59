"""Signs and sums computed by hand: the base is [10, 20, 30, 40], and each test has its own task vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, tensor

from workers.merging.masks import keep, mask_key
from workers.merging.methods import task_vectors

BASE = tensor([10.0, 20.0, 30.0, 40.0])
KEYS = tuple(mask_key(1, model, "weight") for model in "abc")


def near(*taus: list[float]) -> list[Tensor]:
    return [BASE + tensor(tau) for tau in taus]


def delta(merged: Tensor) -> list[float]:
    return [round(float(x), 4) for x in merged - BASE]


# + agrees in the first, they cancel in the second, one alone is left in the third, both agree on - in the fourth.
TWO = ([1.0, 2.0, 0.0, -3.0], [3.0, -2.0, 5.0, -1.0])


def test_four_kinds_of_ties_differ_in_signs_and_in_the_divisor() -> None:
    experts = near(*TWO)
    assert delta(task_vectors.ties(experts, BASE, lambda_=0.5, k=1.0)) == [1.0, 0.0, 2.5, -1.0]
    assert delta(task_vectors.ties_sum(experts, BASE, lambda_=0.5, k=1.0)) == [2.0, 0.0, 2.5, -2.0]
    # The elected signs are +, none, +, -: the majority is +.
    assert delta(task_vectors.ties_majority(experts, BASE, lambda_=0.5, k=1.0)) == [1.0, 1.0, 2.5, -1.0]
    weighted = task_vectors.ties_weighted(
        experts, BASE, weights=[1.0, 3.0], densities=[1.0, 1.0], lambda_=0.5, normalize=True
    )
    # (1 + 9) / 4, the second alone agrees with 2 - 6 = -4, 15 / 3, (-3 - 3) / 4, each halved.
    assert delta(weighted) == [1.25, -1.0, 2.5, -0.75]
    summed = task_vectors.ties_weighted(
        experts, BASE, weights=[1.0, 3.0], densities=[1.0, 1.0], lambda_=0.5, normalize=False
    )
    assert delta(summed) == [5.0, -3.0, 7.5, -3.0]
    # Signs without weights, + where they cancel; sums 10, 2, 15, -6 over the numbers that agree, 2, 1, 1, 2.
    peft = task_vectors.ties_peft(experts, BASE, weights=[1.0, 3.0], densities=[1.0, 1.0])
    assert delta(peft) == [5.0, 2.0, 15.0, -3.0]


def test_the_majority_of_signs_may_be_none() -> None:
    experts = near([1.0, -1.0, 2.0, -2.0], [1.0, -1.0, -2.0, 2.0])
    assert delta(task_vectors.ties_majority(experts, BASE, lambda_=1.0, k=1.0)) == [1.0, -1.0, 0.0, 0.0]


def test_m3_interpolates_where_both_are_kept() -> None:
    """M3 interpolates where both are kept and keeps the single one elsewhere."""
    merged = task_vectors.m3_ties(near(*TWO), BASE, weights=[0.25, 0.75], lambda_=2.0, k=1.0)
    # 0.25 * 1 + 0.75 * 3, nothing, 5 as it is, -(0.25 * 3 + 0.75 * 1), each doubled.
    assert delta(merged) == [5.0, 0.0, 10.0, -3.0]


def test_m3_of_three_models_divides_by_the_weights_of_those_kept() -> None:
    experts = near([2.0, 1.0, 0.0, 1.0], [4.0, 0.0, 0.0, 1.0], [-1.0, 3.0, 0.0, 1.0])
    merged = task_vectors.m3_ties(experts, BASE, weights=[0.2, 0.6, 0.2], lambda_=1.0, k=1.0)
    # The third disagrees in the first; the second has nothing in the second.
    assert delta(merged) == [3.5, 2.0, 0.0, 1.0]


def test_m3_with_the_weights_of_those_kept_zero_leaves_the_base() -> None:
    experts = near([2.0, 0.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0], [-1.0, 3.0, 0.0, 0.0])
    merged = task_vectors.m3_ties(experts, BASE, weights=[0.0, 0.0, 1.0], lambda_=1.0, k=1.0)
    assert delta(merged) == [0.0, 3.0, 0.0, 0.0]


def test_m3_as_in_its_code_elects_the_majority_sign() -> None:
    experts = near(*TWO)
    # 0.25 * 1 + 0.75 * 3, the majority + elects 2 alone, 5 as it is, -(0.25 * 3 + 0.75 * 1), each doubled.
    merged = task_vectors.m3_ties_majority(experts, BASE, weights=[0.25, 0.75], lambda_=2.0, k=1.0)
    assert delta(merged) == [5.0, 4.0, 10.0, -3.0]
    of_model = task_vectors.m3_ties_majority(experts, BASE, weights=[0.25, 0.75], lambda_=2.0, k=1.0, majority=-7)
    assert delta(of_model) == [5.0, -4.0, 10.0, -3.0]
    assert delta(task_vectors.ties_majority(experts, BASE, lambda_=1.0, k=1.0, majority=-1)) == [2.0, -2.0, 5.0, -2.0]
    none = task_vectors.m3_ties_majority(experts, BASE, weights=[0.25, 0.75], lambda_=2.0, k=1.0, majority=0)
    assert delta(none) == [5.0, 0.0, 10.0, -3.0]


def test_m3_as_in_its_code_is_continuous_in_its_shares() -> None:
    """The second and third expert alone keep the second element: one value for a share of zero and for small ones."""
    experts = near([2.0, 0.0, 0.0, 1.0], [4.0, 2.0, 0.0, 1.0], [-1.0, 4.0, 0.0, 1.0])

    def merged(method: Callable[..., Tensor], weights: list[float]) -> list[float]:
        return delta(method(experts, BASE, weights=weights, lambda_=1.0, k=1.0))

    at, near_it = [1.0, 0.0, 0.0], [0.999998, 1e-6, 1e-6]
    assert merged(task_vectors.m3_ties, at)[1] == 0.0
    assert merged(task_vectors.m3_ties, near_it)[1] == 3.0  # a jump
    assert merged(task_vectors.m3_ties_majority, at) == merged(task_vectors.m3_ties_majority, near_it)
    # Of the share 0.5 that the first has in the second element, the others get 0.25 each.
    assert merged(task_vectors.m3_ties_majority, [2.0, 1.0, 1.0])[1] == 3.0
    assert merged(task_vectors.m3_ties_majority, [0.5, 0.4, 0.1])[1] == round(2 * 0.65 + 4 * 0.35, 4)


def test_m3_as_in_its_code_with_equal_weights_is_ties() -> None:
    base, *experts = torch.randn(4, 30, 20, generator=torch.Generator().manual_seed(0))
    merged = task_vectors.m3_ties_majority(experts, base, weights=[1.0] * 3, lambda_=0.7, k=0.4)
    torch.testing.assert_close(merged, task_vectors.ties_majority(experts, base, lambda_=0.7, k=0.4))


def test_m3_on_dare_and_ties_trims_what_dare_kept() -> None:
    """The masks come first, then the share k of all elements, the largest of those that the masks kept."""
    base, *experts = torch.randn(3, 30, 20, generator=torch.Generator().manual_seed(0))
    masked = [
        base + torch.where(keep(key, base.shape, 0.8), (expert - base) / 0.8, 0.0)
        for expert, key in zip(experts, KEYS, strict=False)
    ]
    numbers: dict[str, Any] = {"weights": [0.3, 0.7], "lambda_": 1.2, "k": 0.5}
    merged = task_vectors.m3_dare_ties(experts, base, densities=[0.8, 0.8], keys=KEYS[:2], **numbers)
    torch.testing.assert_close(merged, task_vectors.m3_ties_majority(masked, base, **numbers), rtol=1e-4, atol=1e-5)
    whole = task_vectors.m3_dare_ties(experts, base, densities=[1.0, 1.0], keys=KEYS[:2], **numbers)
    assert torch.equal(whole, task_vectors.m3_ties_majority(experts, base, **numbers))


def test_dare_has_a_mask_per_task_vector() -> None:
    """DARE drops and rescales each task vector by its own mask."""
    base, size = torch.zeros(500), (500,)
    experts = [torch.full(size, 2.0), torch.full(size, 3.0)]
    merged = task_vectors.dare_linear(experts, base, lambdas=[0.5, 1.0], densities=[0.25, 0.5], keys=KEYS[:2])
    masks = [keep(KEYS[0], size, 0.25).float(), keep(KEYS[1], size, 0.5).float()]
    assert torch.equal(merged, masks[0] * 4.0 + masks[1] * 6.0)


def test_dare_of_density_one_is_task_arithmetic() -> None:
    experts = near(*TWO)
    merged = task_vectors.dare_linear(experts, BASE, lambdas=[0.3, 0.7], densities=[1.0, 1.0], keys=KEYS[:2])
    assert torch.equal(merged, task_vectors.task_arithmetic(experts, BASE, [0.3, 0.7]))


def test_m3_on_dare_is_dare_with_direction_times_magnitude() -> None:
    experts = near(*TWO)
    merged = task_vectors.m3_dare(experts, BASE, weights=[1.0, 3.0], lambda_=1.5, densities=[0.6, 0.6], keys=KEYS[:2])
    dare = task_vectors.dare_linear(experts, BASE, lambdas=[0.375, 1.125], densities=[0.6, 0.6], keys=KEYS[:2])
    assert torch.equal(merged, dare)


def test_dare_ties_elects_signs_of_what_was_kept() -> None:
    base, size = torch.zeros(500), (500,)
    experts = [torch.full(size, 2.0), torch.full(size, -3.0)]
    merged = task_vectors.dare_ties(experts, base, lambda_=1.0, densities=[0.5, 0.5], keys=KEYS[:2])
    first, second = (keep(key, size, 0.5) for key in KEYS[:2])
    assert torch.equal(merged, torch.where(second, -6.0, torch.where(first, 4.0, 0.0)))


def test_l1_rescaling_is_by_what_was_lost_of_each_task_vector() -> None:
    experts = near([1.0, 2.0, 3.0, 4.0])
    mask = keep(KEYS[0], (4,), 0.5).float()
    kept = tensor([1.0, 2.0, 3.0, 4.0]) * mask
    merged = task_vectors.dare_linear_l1(experts, BASE, lambdas=[0.5], densities=[0.5], keys=KEYS[:1])
    torch.testing.assert_close(merged, BASE + 0.5 * kept * 10 / kept.sum())


def test_breadcrumbs_add_what_is_left_between_the_cuts() -> None:
    experts = near([1.0, -2.0, 3.0, -4.0], [4.0, 3.0, 2.0, 1.0])
    merged = task_vectors.breadcrumbs(experts, BASE, lambdas=[1.0, 0.5], densities=[0.5, 0.5], gammas=[0.25, 0.25])
    assert delta(merged) == [0.0, -2.0 + 1.5, 3.0 + 1.0, 0.0]


def test_breadcrumbs_ties_adds_those_that_agree() -> None:
    experts = near([1.0, -2.0, 3.0, -4.0], [4.0, 3.0, 2.0, 1.0])
    merged = task_vectors.breadcrumbs_ties(
        experts,
        BASE,
        weights=[1.0, 1.0],
        densities=[0.5, 0.5],
        gammas=[0.25, 0.25],
        lambda_=1.0,
        normalize=False,
    )
    assert delta(merged) == [0.0, 3.0, 5.0, 0.0]
