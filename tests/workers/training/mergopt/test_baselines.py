"""SAM and ASAM by hand, the tangent model against finite differences, and fits against known distributions."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.builders import lora_adapter, tiny_family, tiny_llama
from workers.errors import InvalidModel
from workers.training.mergopt.fit import fit, sample_of
from workers.training.mergopt.sharpness import SharpnessAware
from workers.training.mergopt.tangent import LinearizedModel, TangentModel


def test_sam_by_hand() -> None:
    """L = theta_0^2 + 2 theta_1^2 at (3, 1): g = (6, 4), |g| = sqrt(52), theta + 0.1 g / |g|."""
    parameter = nn.Parameter(torch.tensor([3.0, 1.0]))
    optimizer = SharpnessAware(torch.optim.SGD([parameter], lr=0.1), rho=0.1)
    calls = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        calls.append(parameter.tolist())
        loss = parameter[0] ** 2 + 2 * parameter[1] ** 2
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    norm = math.sqrt(52)
    up = [3 + 0.1 * 6 / norm, 1 + 0.1 * 4 / norm]
    assert float(loss.detach()) == 11.0
    assert calls == [[3.0, 1.0], pytest.approx(up)]
    assert parameter.tolist() == pytest.approx([3 - 0.1 * 2 * up[0], 1 - 0.1 * 4 * up[1]])


def test_asam_by_hand() -> None:
    """One matrix (3, 1) with g = (6, 4): T = (3.01, 1.01), theta + 0.5 T^2 g / |T g|."""
    parameter = nn.Parameter(torch.tensor([[3.0, 1.0]]))
    optimizer = SharpnessAware(torch.optim.SGD([parameter], lr=0.1), is_adaptive=True)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = parameter[0, 0] ** 2 + 2 * parameter[0, 1] ** 2
        loss.backward()
        return loss

    optimizer.step(closure)
    norm = math.hypot(3.01 * 6, 1.01 * 4)
    up = [3 + 0.5 * 3.01**2 * 6 / norm, 1 + 0.5 * 1.01**2 * 4 / norm]
    assert parameter[0].tolist() == pytest.approx([3 - 0.1 * 2 * up[0], 1 - 0.1 * 4 * up[1]])


def test_sam_without_a_gradient_stays_and_returns_bits() -> None:
    parameter = nn.Parameter(torch.tensor([0.1, 0.7]))
    optimizer = SharpnessAware(torch.optim.SGD([parameter], lr=0.0))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**3).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(parameter.detach(), torch.tensor([0.1, 0.7]))
    with pytest.raises(ValueError, match="needs a closure"):
        optimizer.step()
    with pytest.raises(ValueError, match="rho 0"):
        SharpnessAware(torch.optim.SGD([parameter], lr=0.1), rho=0.0)


@pytest.mark.slow
def test_tangent_model_is_linear(tmp_path: Path) -> None:
    """A tangent model is linear and equals the model at its origin."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "m"), attn_implementation="eager").eval()
    tokens = torch.arange(5, 15).view(2, 5)
    at_origin = model(input_ids=tokens).logits.detach()
    tangent = TangentModel(model)
    assert torch.allclose(tangent(input_ids=tokens), at_origin, atol=1e-5)

    torch.manual_seed(0)
    steps = [1e-3 * torch.randn_like(p) for p in model.parameters()]

    def logits_at(times: float) -> torch.Tensor:
        with torch.no_grad():
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter += times * step
            linear: torch.Tensor = tangent(input_ids=tokens).detach()
            whole = model(input_ids=tokens).logits.detach()
            for parameter, step in zip(model.parameters(), steps, strict=True):
                parameter -= times * step
        if times == 1:
            assert (whole - linear).abs().max() < 0.1 * (linear - at_origin).abs().max()
        return linear

    once, twice = logits_at(1) - at_origin, logits_at(2) - at_origin
    assert once.abs().max() > 1e-3
    assert torch.allclose(twice, 2 * once, rtol=1e-3, atol=1e-5)
    tangent(input_ids=tokens).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.slow
def test_linearized_model_generates_as_the_tangent_model(tmp_path: Path) -> None:
    """Tokens that are read one after the other have the logits that the tangent model has for the whole text."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_llama(tmp_path / "m"), attn_implementation="eager").eval()
    tangent = TangentModel(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
        tokens = torch.arange(5, 15).view(2, 5)
        positions, mask = torch.arange(5).expand(2, 5), torch.ones_like(tokens)
        expected = tangent(input_ids=tokens)
        assert not torch.allclose(expected, model(input_ids=tokens).logits, atol=1e-3)
    linearized = LinearizedModel(tangent)
    with torch.inference_mode():
        first = linearized(
            input_ids=tokens[:, :3], attention_mask=mask[:, :3], position_ids=positions[:, :3], use_cache=True
        )
        second = linearized(
            input_ids=tokens[:, 3:],
            attention_mask=mask,
            position_ids=positions[:, 3:],
            past_key_values=first.past_key_values,
            use_cache=True,
        )
    assert torch.allclose(first.logits, expected[:, :3], atol=1e-4)
    assert torch.allclose(second.logits[:, -1], expected[:, -1], atol=1e-4)


def laplace_sample(scale: float, size: int = 200_000) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(0, 2, (size,), generator=generator) * 2.0 - 1
    return signs * scale * torch.empty(size).exponential_(generator=generator)


def test_a_fit_finds_the_scale_and_tells_the_distributions_apart() -> None:
    sample = laplace_sample(0.002)
    laplace, gaussian = fit(sample), fit(sample, "gaussian")
    assert laplace.scale == pytest.approx(0.002, rel=0.01)
    assert gaussian.scale == pytest.approx(0.002 * math.sqrt(2), rel=0.01)
    assert laplace.log_likelihood == pytest.approx(-math.log(2 * 0.002) - 1, rel=0.01)
    assert laplace.log_likelihood > gaussian.log_likelihood
    assert laplace.distance < 0.005 < 0.05 < gaussian.distance


def test_a_fit_by_hand() -> None:
    """The Laplace fit of (-1, 1, 2) is the one computed by hand.

    b = 4/3; F(-1) = e^(-3/4) / 2 = 0.2362, F(1) = 0.7638, F(2) = 0.8884; the largest gap to the steps 0, 1/3, 2/3, 1 is
    that of F(1) to 1/3.
    """
    found = fit(torch.tensor([2.0, -1.0, 1.0]))
    assert found.scale == pytest.approx(4 / 3)
    assert found.distance == pytest.approx(1 - 0.5 * math.exp(-0.75) - 1 / 3)
    assert found.log_likelihood == pytest.approx(-math.log(8 / 3) - 1)
    assert (found.zeros, found.num_elements) == (0.0, 3)


def test_fits_refuse_what_has_none() -> None:
    with pytest.raises(ValueError, match="the task vectors are 0"):
        fit(torch.zeros(5))
    with pytest.raises(ValueError, match="'cauchy'; expected laplace or gaussian"):
        fit(torch.ones(5), "cauchy")


def test_task_vectors_of_checkpoints_and_adapters(tmp_path: Path) -> None:
    family = tiny_family(tmp_path, experts=("math", "text"), noise=0.02)
    base = Path(family.base.directory)
    found = fit(sample_of(base, [Path(expert.directory) for expert in family.experts]), "gaussian")
    assert found.scale == pytest.approx(0.02, rel=0.05)
    lora_adapter(base, tmp_path / "adapter")
    sample = sample_of(base, [tmp_path / "adapter"], num_elements=2000)
    assert 1000 < len(sample) < 4000
    assert fit(sample).zeros == 0  # tensors that the adapter does not change are left out
    tiny_llama(tmp_path / "wider", hidden=64)
    with pytest.raises(InvalidModel, match="no tensor in common"):
        sample_of(base, [tmp_path / "wider"])
