from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import tensor

from search_spaces.errors import InvalidRecipe
from tests.workers.merging.methods.karcher_reference import TOLERANCE, iterates
from workers.merging.methods import averages, spherical


def test_passthrough_may_scale() -> None:
    weight = tensor([2.0, -4.0])
    assert torch.equal(averages.passthrough([weight]), weight)
    assert torch.equal(averages.passthrough([weight], scale=0.5), tensor([1.0, -2.0]))


def test_nuslerp_turns_by_the_share_of_the_second_weight() -> None:
    first, second = tensor([2.0, 0.0]), tensor([0.0, 4.0])
    # t = 1 / (2 + 1), omega = 90 degrees: sin 60 of the first, sin 30 of the second.
    merged = averages.nuslerp([first, second], weights=[2.0, 1.0])
    torch.testing.assert_close(merged, tensor([math.sqrt(3), 2.0]))


def test_nuslerp_of_weights_that_sum_to_zero_is_half_way() -> None:
    first, second = tensor([1.0, 0.0]), tensor([0.0, 1.0])
    torch.testing.assert_close(averages.nuslerp([first, second], weights=[1.0, -1.0]), tensor([0.5**0.5, 0.5**0.5]))


def test_nuslerp_stays_on_the_circle_where_slerp_goes_straight() -> None:
    angle = math.acos(0.9999)
    first, second = tensor([1.0, 0.0]), tensor([math.cos(angle), math.sin(angle)])
    merged = averages.nuslerp([first, second], weights=[1.0, 1.0])
    torch.testing.assert_close(merged, tensor([math.cos(angle / 2), math.sin(angle / 2)]), rtol=1e-7, atol=1e-7)


def test_nuslerp_rows_and_columns_have_angles_of_their_own() -> None:
    # Row 0 is orthogonal, row 1 parallel.
    first, second = tensor([[1.0, 0.0], [1.0, 1.0]]), tensor([[0.0, 1.0], [3.0, 3.0]])
    half = 0.5**0.5
    by_rows = averages.nuslerp_rows([first, second], weights=[1.0, 1.0])
    torch.testing.assert_close(by_rows, tensor([[half, half], [2.0, 2.0]]))
    by_columns = averages.nuslerp_columns([first.T, second.T], weights=[1.0, 1.0])
    torch.testing.assert_close(by_columns, by_rows.T)


def test_nuslerp_of_task_vectors_turns_around_the_base() -> None:
    base = tensor([10.0, 10.0])
    merged = averages.nuslerp_task_vectors([base + tensor([2.0, 0.0]), base + tensor([0.0, 4.0])], base, weights=[2, 1])
    torch.testing.assert_close(merged, base + tensor([math.sqrt(3), 2.0]))


def test_multislerp_of_two() -> None:
    """MultiSLERP of two is the middle of the arc with the mean length."""
    merged = spherical.multislerp([tensor([2.0, 0.0]), tensor([0.0, 4.0])], weights=[1.0, 1.0])
    torch.testing.assert_close(merged, 3 * tensor([0.5**0.5, 0.5**0.5]))


def test_multislerp_maps_the_mean_tangent_back_to_the_sphere() -> None:
    # Units e1, e2 with weights 3/4 and 1/4: the mean direction is (3, 1) / sqrt 10.
    merged = spherical.multislerp([tensor([1.0, 0.0]), tensor([0.0, 1.0])], weights=[0.75, 0.25])
    mean = tensor([3.0, 1.0]) / math.sqrt(10)
    tangents = [unit - (unit @ mean) * mean for unit in (tensor([1.0, 0.0]), tensor([0.0, 1.0]))]
    tangent = 0.75 * tangents[0] + 0.25 * tangents[1]
    size = tangent.norm()
    torch.testing.assert_close(merged, torch.cos(size) * mean + torch.sin(size) / size.clamp(min=1e-9) * tangent)


def test_multislerp_without_direction() -> None:
    """MultiSLERP without a mean direction averages linearly or raises an error."""
    first = tensor([1.0, 0.0])
    assert torch.equal(spherical.multislerp([first, -first], weights=[1.0, 1.0]), torch.zeros(2))
    angles = [0, 2 * math.pi / 3, 4 * math.pi / 3]
    around = [torch.tensor([math.cos(a), math.sin(a)], dtype=torch.float64) for a in angles]
    with pytest.raises(InvalidRecipe, match="multislerp: the directions of 3 tensors cancel with weights"):
        spherical.multislerp(around, weights=[1.0, 1.0, 1.0])
    with pytest.raises(InvalidRecipe, match=r"multislerp: weights .* sum to 0\.0; they must not sum to zero"):
        spherical.multislerp([first, first], weights=[1.0, -1.0])


def test_karcher_mean_of_axes() -> None:
    """The Karcher mean of the axes is their diagonal with the mean length."""
    axes = [torch.eye(3)[i] * length for i, length in enumerate((1.0, 2.0, 3.0))]
    torch.testing.assert_close(spherical.karcher(axes, weights=[1.0] * 3), torch.full((3,), 2 / math.sqrt(3)))


def test_karcher_mean_divides_by_weight() -> None:
    """The Karcher mean divides an arc by weight, where the normalised mean does not."""
    first, second = tensor([1.0, 0.0]), tensor([0.0, 1.0])
    merged = spherical.karcher([first, second], weights=[3.0, 1.0])
    torch.testing.assert_close(merged, tensor([math.cos(math.pi / 8), math.sin(math.pi / 8)]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spread", [1e-4, 1e-2, 0.3, 1.0])
@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0), (0.2, 0.5, 0.3)])
def test_karcher_is_its_iteration_in_float64_and_near_the_mean(spread: float, weights: tuple[float, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(500, generator=generator)
    tensors = [common + spread * torch.randn(500, generator=generator) for _ in weights]
    means = iterates(tensors, weights, 60)
    stop = min(10, [length < TOLERANCE for _, length in means].index(True))
    merged = spherical.karcher(tensors, weights=weights)
    torch.testing.assert_close(merged, means[stop][0].float(), rtol=1e-6, atol=1e-7)
    # A step is at most a third of the one before, so all steps that were not taken are at most 3/2 of the tolerance.
    lengths = [length for _, length in means]
    assert all(after < before / 3 for before, after in itertools.pairwise(lengths) if before > 1e-12)
    mean = means[-1][0]
    assert lengths[-1] < 1e-14
    assert (means[stop][0] - mean).norm() <= 1.5 * TOLERANCE * mean.norm()


def test_karcher_counts_a_zero_tensor_in_the_length_only() -> None:
    assert spherical.karcher([tensor([0.0, 2.0]), torch.zeros(2)], weights=[1.0, 1.0]).tolist() == [0.0, 1.0]
    assert spherical.karcher([torch.zeros(2), torch.zeros(2)], weights=[1.0, 1.0]).tolist() == [0.0, 0.0]


def test_model_stock_follows_the_angle() -> None:
    """Model Stock moves from the base by the angle between task vectors."""
    base = tensor([5.0, 5.0])
    # cos = 0.5 of two models: t = 2 * 0.5 / (1 + 0.5) = 2/3.
    experts = [base + tensor([1.0, 0.0]), base + tensor([0.5, math.sqrt(3) / 2])]
    mean = tensor([0.75, math.sqrt(3) / 4])
    torch.testing.assert_close(averages.model_stock(experts, base), base + 2 / 3 * mean)


def test_model_stock_of_orthogonal_task_vectors_is_the_base() -> None:
    base = torch.zeros(3)
    assert torch.equal(averages.model_stock(list(torch.eye(3)), base), base)


def test_model_stock_keeps_the_base_where_the_ratio_has_no_value() -> None:
    base = torch.zeros(2)
    first = tensor([1.0, 0.0])
    assert torch.equal(averages.model_stock([first, -first], base), base)  # 1 + cos = 0


@pytest.mark.parametrize("method", [averages.model_stock, averages.model_stock_rows])
def test_model_stock_pole(method: Callable[..., torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    """Model Stock near its pole is refused, or kept with a warning."""
    base = torch.zeros(2)
    experts = [tensor([1.0, 0.0]), tensor([-0.99, math.sqrt(1 - 0.99**2)])]
    problem = "w: the ratio of model_stock is -198, at a mean cosine of -0.99 between the task vectors of 2 models"
    with pytest.raises(InvalidRecipe, match=f"^{problem}; expected -2 to 1: leave out a model, or use another method$"):
        method(experts, base, name="w")
    assert not caplog.text
    kept = method(experts, base, unbounded=True, name="w")
    torch.testing.assert_close(kept, -198 * (experts[0] + experts[1]) / 2, rtol=1e-4, atol=1e-4)
    assert f"{problem}; beyond -2 to 1 it is further from the base than the models are" in caplog.text


@pytest.mark.parametrize("count", [2, 3, 4])
def test_model_stock_range(count: int) -> None:
    """Model Stock's range ends where the merge is as far from the base as the models."""
    # N unit vectors whose cosines are all -1/N: their Gram matrix is its Cholesky factor times that factor's transpose.
    gram = torch.full((count, count), -1 / count, dtype=torch.float64).fill_diagonal_(1)
    base, experts = torch.zeros(count), list(torch.linalg.cholesky(gram).float())
    merged = averages.model_stock(experts, base)
    assert float(merged.norm()) == pytest.approx(1, abs=1e-5)
    gram = torch.full((count, count), -1 / count - 1e-3, dtype=torch.float64).fill_diagonal_(1)
    with pytest.raises(InvalidRecipe, match=rf"^a tensor: the ratio of model_stock is -\d.*; expected -{count} to 1"):
        averages.model_stock(list(torch.linalg.cholesky(gram).float()), base)


def test_model_stock_by_rows_has_a_ratio_for_each() -> None:
    base = torch.zeros(2, 2)
    experts = [tensor([[1.0, 0.0], [1.0, 0.0]]), tensor([[1.0, 0.0], [0.0, 1.0]])]
    assert averages.model_stock_rows(experts, base).tolist() == [[1.0, 0.0], [0.0, 0.0]]
