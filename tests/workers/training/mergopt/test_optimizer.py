"""MergOPT: the update by hand, theta restored bit for bit, one draw per step, and the same in both modes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.workers.training.mergopt.test_noise import laplace_by_hand
from workers.training.mergopt import in_layers
from workers.training.mergopt.elements import parts_of
from workers.training.mergopt.noise import Gaussian, Laplace, draw_key
from workers.training.mergopt.optimizer import COEFFICIENTS, MAX_MODELS, MergOPT, draw_of


def network(seed: int = 0, *, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """An embedding that shares its weight with the head, a norm, and layers with biases."""
    torch.manual_seed(seed)
    embedding = nn.Embedding(11, 8)
    model = nn.Sequential(embedding, nn.LayerNorm(8), nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 8))
    head = nn.Linear(8, 11, bias=False)
    head.weight = embedding.weight
    model.append(head)
    return model.to(dtype)


TOKENS = torch.arange(10).view(2, 5)


def loss_of(model: nn.Module, tokens: torch.Tensor = TOKENS) -> torch.Tensor:
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), (tokens.flatten() + 1) % 11)


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    return closure


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def are_equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_an_update_by_hand() -> None:
    """L = (a theta_0^2 + c theta_1^2) / 2 and SGD: theta_i - lr a_i (theta_i + (K alpha - 1) z_i), algorithm 1."""
    theta, curvature, rate = torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5]), 0.1
    parameter = nn.Parameter(theta.clone())
    optimizer = MergOPT(torch.optim.SGD([parameter], lr=rate), noise=Laplace(0.2), coefficients=(0.6,), max_models=1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = 0.5 * (curvature * parameter**2).sum()
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    moved = [float(theta[i]) - 0.4 * laplace_by_hand(draw_key(0, 0), i, 0.2) for i in range(2)]  # K alpha - 1 = -0.4
    assert float(loss.detach()) == pytest.approx(0.5 * (3.0 * moved[0] ** 2 + 0.5 * moved[1] ** 2))
    expected = [1.0 - 0.1 * 3.0 * moved[0], -2.0 - 0.1 * 0.5 * moved[1]]
    assert parameter.tolist() == pytest.approx(expected)


def test_draws_cover_what_the_paper_says_equally() -> None:
    draws = [draw_of(0, step) for step in range(6000)]
    assert {draw.alpha for draw in draws} == set(COEFFICIENTS) == {0.1, 0.2, 0.3, 0.4, 0.5, 0.6}
    assert {draw.num_models for draw in draws} == set(range(1, MAX_MODELS + 1)) == set(range(1, 8))
    for alpha in COEFFICIENTS:
        assert abs(sum(draw.alpha == alpha for draw in draws) - 1000) < 120
    assert draw_of(0, 5) == draw_of(0, 5) != draw_of(1, 5)
    assert draw_of(0, 0, coefficients=(0.3,), max_models=1).factor == pytest.approx(-0.7)


def test_the_default_is_the_papers() -> None:
    assert Laplace() == Laplace(0.0005)


@pytest.mark.parametrize("in_place", [True, False], ids=["copy", "in layers"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_offset_within_and_come_back_bit_for_bit(in_place: bool, dtype: torch.dtype) -> None:
    model = network(dtype=dtype)
    before = weights(model)
    optimizer = MergOPT(
        torch.optim.SGD(model.parameters(), lr=0.1), noise=Laplace(0.05), model=None if in_place else model, seed=1
    )
    plain = float(loss_of(model).detach())
    with optimizer.offset():
        assert float(loss_of(model).detach()) != plain
        assert are_equal(weights(model), before) is not in_place
    assert are_equal(weights(model), before)
    assert float(loss_of(model).detach()) == plain
    with pytest.raises(ZeroDivisionError), optimizer.offset():
        raise ZeroDivisionError
    assert are_equal(weights(model), before)
    assert float(loss_of(model).detach()) == plain


def test_adding_and_subtracting_would_not_give_the_bits_back() -> None:
    """What the test before would notice: float addition does not undo itself."""
    model = network()
    before = weights(model)
    table, key = Laplace(0.05).quantiles, draw_key(0, 0)
    for part in parts_of(model.parameters()):
        part.add_noise(table, key=key)
        part.add_noise(-table, key=key)
    assert not are_equal(weights(model), before)


def test_both_modes_give_the_same_gradients_and_updates() -> None:
    models = network(), network()
    optimizers = [
        MergOPT(torch.optim.AdamW(model.parameters(), lr=1e-2), noise=Laplace(0.02), model=layers, seed=3)
        for model, layers in zip(models, (None, models[1]), strict=True)
    ]
    for _ in range(5):
        losses = [float(o.step(closure_of(m, o)).detach()) for m, o in zip(models, optimizers, strict=True)]
        assert losses[0] == losses[1]
        for one, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert one.grad is not None
            assert other.grad is not None
            assert torch.equal(one.grad, other.grad)
            assert torch.equal(one, other)


def test_both_modes_agree_under_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    models = network(), network()

    def closure(model: nn.Sequential, optimizer: MergOPT) -> torch.Tensor:
        optimizer.zero_grad()
        embedded = model[0](TOKENS)
        hidden = checkpoint(model[1:5], embedded, use_reentrant=False)
        loss = nn.functional.cross_entropy(model[5](hidden).flatten(0, 1), (TOKENS.flatten() + 1) % 11)
        loss.backward()
        return loss

    for model, layers in zip(models, (None, models[1]), strict=True):
        optimizer = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1), noise=Laplace(0.05), model=layers, seed=3)
        for _ in range(3):
            optimizer.step(partial(closure, model, optimizer))
    assert are_equal(weights(models[0]), weights(models[1]))


def test_in_layers_one_tensor_with_noise_exists_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory it takes is that of the largest tensor. A layer's weight and bias exist together; no two weights."""
    alive, most = 0, 0
    made = in_layers._Draw._made

    def freed(size: int) -> None:
        nonlocal alive
        alive -= size

    def counted(self: Any, part: Any) -> torch.Tensor:
        nonlocal alive, most
        tensor = made(self, part)
        alive += tensor.nbytes
        most = max(most, alive)
        weakref.finalize(tensor.untyped_storage(), freed, tensor.nbytes)
        return tensor

    monkeypatch.setattr(in_layers._Draw, "_made", counted)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    optimizer = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1), model=model, seed=1)
    gc.collect()
    with optimizer.offset():
        model(torch.randn(3, 16)).sum().backward()
    layer = 4 * (16 * 16 + 16)
    assert 0 < most <= layer
    assert alive == 0


def test_state_dict_within_is_theta_in_layers() -> None:
    model = network()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1), noise=Laplace(0.5), model=model, seed=1)
    with optimizer.offset():
        loss_of(model).backward()
        within = model.state_dict()
    assert all(torch.equal(within[name], value) for name, value in before.items())


def test_micro_batches_share_a_draw() -> None:
    """Micro-batches of a step share a draw, and the next step has another."""
    model = network()
    optimizer = MergOPT(torch.optim.SGD(model.parameters(), lr=0.0), noise=Laplace(0.05), seed=1)
    seen = []
    for _ in range(2):
        for _ in range(3):
            with optimizer.offset() as draw:
                seen.append((draw, weights(model)))
                loss_of(model).backward()
        optimizer.step()
    first, second = seen[:3], seen[3:]
    for group in (first, second):
        assert all(draw == group[0][0] and are_equal(found, group[0][1]) for draw, found in group)
    assert first[0][0].key != second[0][0].key
    assert not are_equal(first[0][1], second[0][1])


def test_a_tied_weight_has_one_offset_and_counts_once() -> None:
    model = network()
    parts = parts_of([*model.parameters(), model.get_parameter("5.weight")])
    assert [part.start for part in parts] == [0, 88, 96, 104, 152, 158, 206]


@pytest.mark.parametrize(("foreach", "fused"), [(True, None), (None, True), (False, None)])
def test_every_implementation_of_adamw_is_wrapped(foreach: bool | None, fused: bool | None) -> None:
    model, other = network(), network()
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=foreach, fused=fused)
    optimizer = MergOPT(adamw, noise=Laplace(0.02), seed=2)
    reference = MergOPT(torch.optim.AdamW(other.parameters(), lr=1e-2), noise=Laplace(0.02), seed=2)
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer))
        reference.step(closure_of(other, reference))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def test_autocast_clipping_and_a_schedule_work_around_it() -> None:
    model = network()
    optimizer = MergOPT(torch.optim.AdamW(model.parameters(), lr=1e-2), noise=Laplace(0.01), seed=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    before = weights(model)
    for _ in range(3):
        optimizer.zero_grad()
        with optimizer.offset(), torch.autocast("cpu", dtype=torch.bfloat16):
            loss_of(model).backward()
        assert float(nn.utils.clip_grad_norm_(model.parameters(), 1e-3)) > 1e-3
        optimizer.step()
        schedule.step()
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4)
    assert not are_equal(weights(model), before)
    assert all(torch.isfinite(value).all() for value in weights(model))


def test_a_gradient_scaler_steps_it() -> None:
    model = network()
    optimizer = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1), noise=Laplace(0.01), seed=2)
    other = network()
    reference = MergOPT(torch.optim.SGD(other.parameters(), lr=0.1), noise=Laplace(0.01), seed=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for _ in range(2):
        optimizer.zero_grad()
        with optimizer.offset():
            scaler.scale(loss_of(model)).backward()
        scaler.step(optimizer)
        scaler.update()
        reference.step(closure_of(other, reference))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    model = network()
    optimizer = MergOPT(torch.optim.AdamW(model.parameters(), lr=1e-2), noise=Laplace(0.02), seed=2)
    optimizer.step(closure_of(model, optimizer))
    state, saved = copy.deepcopy(optimizer.state_dict()), weights(model)
    optimizer.step(closure_of(model, optimizer))

    again = network()
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), saved, strict=True):
            parameter.copy_(value)
    resumed = MergOPT(torch.optim.AdamW(again.parameters(), lr=1e-2), noise=Laplace(0.02), seed=99)
    resumed.load_state_dict(state)
    resumed.step(closure_of(again, resumed))
    assert are_equal(weights(again), weights(model))
    with pytest.raises(ValueError, match="expected one that its state_dict"):
        resumed.load_state_dict(torch.optim.AdamW(again.parameters()).state_dict())


def test_frozen_weights_may_get_the_offset() -> None:
    """As with adapters: what moves is not what is trained."""
    model = network()
    trained = list(model[4].parameters())
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for parameter in trained:
        parameter.requires_grad_(True)
    before = weights(model)
    optimizer = MergOPT(torch.optim.SGD(trained, lr=0.1), noise=Laplace(0.1), moved=model[2].parameters(), seed=1)
    with optimizer.offset():
        assert not torch.equal(model.get_parameter("2.weight"), before[3])
        assert torch.equal(model.get_parameter("4.weight"), before[5])
    optimizer.step(closure_of(model, optimizer))
    assert torch.equal(model.get_parameter("2.weight"), before[3])
    assert not torch.equal(model.get_parameter("4.weight"), before[5])


@pytest.mark.parametrize("in_layers", [False, True])
def test_offset_within_an_outer_autocast(in_layers: bool) -> None:
    """An outer autocast keeps casts of weights from an earlier forward pass, which must not hide the offset."""
    model = network()
    optimizer = MergOPT(
        torch.optim.SGD(model.parameters(), lr=0.0), noise=Laplace(0.5), model=model if in_layers else None, seed=1
    )
    assert optimizer.draw.factor != 0
    with torch.autocast("cpu", torch.bfloat16):
        before = model(TOKENS)
        with optimizer.offset():
            within = model(TOKENS)
        after = model(TOKENS)
    assert not torch.equal(before, within)
    assert torch.equal(before, after)


def test_state_of_noise_on_other_weights_is_refused() -> None:
    model = network()
    state = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1)).state_dict()
    other = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1), moved=model[2].parameters())
    with pytest.raises(ValueError, match=r"the state is of noise on \d+ numbers; expected \d+"):
        other.load_state_dict(state)
    del state["mergopt"]["moved"]  # of an earlier version
    other.load_state_dict(state)


@contextmanager
def refused(message: str, kind: type[Exception] = RuntimeError) -> Iterator[None]:
    with pytest.raises(kind, match=message):
        yield


def test_misuse_is_refused() -> None:
    model = network()
    optimizer = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model).backward()
    with refused("without gradients from within offset"):
        optimizer.step()  # gradients of theta: plain SGD without a word
    with optimizer.offset():
        with refused("step\\(\\) within offset"):
            optimizer.step()
        with refused("offset\\(\\) within offset"), optimizer.offset():
            pass
    with refused("none can be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    with refused("expected at least one", ValueError):
        MergOPT(sgd, coefficients=())
    with refused("max_models 0; expected at least 1", ValueError):
        MergOPT(sgd, max_models=0)
    with refused("the model lacks 6 of the 7", ValueError):
        other = MergOPT(torch.optim.SGD(model.parameters(), lr=0.1), model=model[5], seed=1)
        with other.offset():
            pass
    with refused("dtype torch.int64", ValueError):
        MergOPT(sgd, moved=[torch.zeros(2, dtype=torch.long)])


def test_gaussian_noise_is_an_option() -> None:
    model, other = network(), network()
    for each, noise in ((model, Gaussian(0.05)), (other, Laplace(0.05))):
        optimizer = MergOPT(torch.optim.SGD(each.parameters(), lr=0.1), noise=noise, seed=1)
        optimizer.step(closure_of(each, optimizer))
    assert not are_equal(weights(model), weights(other))
