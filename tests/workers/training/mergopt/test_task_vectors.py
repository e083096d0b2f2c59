"""Offsets of task vectors: merges by equation 5 by hand, parts of real vectors, and other experts' states."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from workers.training.mergopt.optimizer import MergOPT
from workers.training.mergopt.task_vectors import TaskVectors

SIZES = (3, 2)


def tensors(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for size in SIZES]


def parameters(of: list[torch.Tensor]) -> list[nn.Parameter]:
    return [nn.Parameter(tensor.clone()) for tensor in of]


def optimizer_of(trained: list[nn.Parameter], noise: TaskVectors, **options: object) -> MergOPT:
    return MergOPT(torch.optim.SGD(trained, lr=0.1), noise=noise, **options)  # type: ignore[arg-type]


def test_offset_of_a_merge_is_the_merge() -> None:
    """Equation 5: the gradient is taken at theta_0 + alpha (theta - theta_0) + alpha sum D_j, the merge itself."""
    base, theta, experts = tensors(0), tensors(1), [tensors(2), tensors(3), tensors(4)]
    trained = parameters(theta)
    optimizer = optimizer_of(trained, TaskVectors(experts, base), coefficients=(0.3,), seed=5)
    seen = set()
    for _ in range(40):
        with optimizer.offset() as draw:
            found = [parameter.detach().clone() for parameter in trained]
        assert 1 <= draw.num_models <= 4, "no more models than there are experts"
        seen.add(draw.num_models)
        drawn = random.Random(f"task vectors {draw.key}").sample(range(3), draw.num_models - 1)
        for i, parameter in enumerate(found):
            tau = theta[i] - base[i] + sum(experts[j][i] for j in drawn)
            assert torch.allclose(parameter, base[i] + 0.3 * tau, atol=1e-6)
        for parameter, value in zip(trained, theta, strict=True):
            parameter.grad = torch.zeros_like(parameter)
            assert torch.equal(parameter, value), "restored bit for bit"
        optimizer.step()
    assert seen == {1, 2, 3, 4}


def test_resampled_offsets_are_parts_of_real_task_vectors() -> None:
    theta, experts = tensors(1), [tensors(2), tensors(3)]
    trained = parameters(theta)
    optimizer = optimizer_of(trained, TaskVectors(experts), coefficients=(0.5,), max_models=4, seed=1)
    chosen = set()
    for _ in range(40):
        with optimizer.offset() as draw:
            moved = [p.detach() - value for p, value in zip(trained, theta, strict=True)]
        of = []
        for i, offset in enumerate(moved):
            candidates = [draw.factor * expert[i] for expert in experts]
            of.append(next((j for j, each in enumerate(candidates) if torch.allclose(offset, each, atol=1e-6)), None))
        assert None not in of
        if draw.factor:
            chosen.add(tuple(of))
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert chosen == {(0, 0), (0, 1), (1, 0), (1, 1)}, "each parameter has an expert of its own"


def test_state_of_other_experts_is_refused() -> None:
    trained = parameters(tensors(1))
    state = copy.deepcopy(optimizer_of(trained, TaskVectors([tensors(2)])).state_dict())
    optimizer_of(trained, TaskVectors([tensors(2)])).load_state_dict(state)
    for other in (optimizer_of(trained, TaskVectors([tensors(3)])), MergOPT(torch.optim.SGD(trained, lr=0.1))):
        with pytest.raises(ValueError, match="the state is of other task vectors"):
            other.load_state_dict(state)


def test_task_vectors_that_do_not_fit_are_refused() -> None:
    trained = parameters(tensors(1))
    with pytest.raises(ValueError, match="expected those of at least one expert"):
        TaskVectors([])
    with pytest.raises(ValueError, match="task vectors of 1 parameters with other shapes than the 2"):
        optimizer_of(trained, TaskVectors([tensors(2)[:1]]))
    with pytest.raises(ValueError, match="need a copy; leave `model` out"):
        optimizer_of(trained, TaskVectors([tensors(2)]), model=nn.ParameterList(trained))
