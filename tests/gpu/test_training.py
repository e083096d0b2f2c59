"""Fine-tuning on a GPU: MergOPT's offsets and their cost, and a training that goes on after a kill."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.conftest import Figure
from tests.workers.training.finetuning.test_trainer import Killed, are_equal, place, spec_of, weights
from workers.training.finetuning import checkpoints
from workers.training.finetuning.history import CHECKPOINTS, METRICS, read_history
from workers.training.finetuning.trainer import train
from workers.training.mergopt.optimizer import MergOPT
from workers.types import Family

__all__ = ["place"]  # a fixture

pytestmark = [pytest.mark.gpu, pytest.mark.bare]

GPU = torch.device("cuda", 0)


def steps_of(place: Path, out: Path, device: torch.device, **changes: Any) -> list[float]:
    """The loss of every update of a training on a device; its results are in `out`."""
    out.mkdir(exist_ok=True)
    train(spec_of(place, **changes), out, device=device)
    return [line["loss"] for line in read_history(out / METRICS)]


@pytest.mark.parametrize("kind", ["mergopt", "adamw", "asam", "tangent"])
def test_a_gpu_trains_as_the_cpu(place: Path, tmp_path: Path, kind: str) -> None:
    """The first losses are those of the CPU but for rounding."""
    method = {"kind": kind, "scale": 0.002, "rho": 0.02}
    ours = steps_of(place, tmp_path / "gpu", GPU, method=method)
    theirs = steps_of(place, tmp_path / "cpu", torch.device("cpu"), method=method)
    assert ours == pytest.approx(theirs, rel=1e-3)
    assert len(ours) == 6


@pytest.mark.parametrize("method", [{"kind": "mergopt"}, {"kind": "mergopt", "in_layers": True}, {"kind": "asam"}])
def test_a_killed_training_ends_with_the_same_bits(place: Path, tmp_path: Path, method: dict[str, Any]) -> None:
    """A training that goes on from its checkpoint has the weights of an uninterrupted one."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps_of(place, whole, GPU, method=method)
    parts.mkdir()

    def killing(line: Mapping[str, Any]) -> None:
        if line["step"] == 5:
            raise Killed

    with pytest.raises(Killed):
        train(spec_of(place, method=method), parts, report=killing, device=GPU)
    assert checkpoints.step_of(checkpoints.latest(parts / CHECKPOINTS)) == 4
    train(spec_of(place, method=method), parts, device=GPU)
    assert are_equal(weights(parts), weights(whole))


def _model(family: Family) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(family.base.directory, dtype=torch.bfloat16).to(GPU)


def _closure(model: Any, tokens: torch.Tensor) -> Any:
    def closure() -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        return loss

    return closure


def test_offsets_leave_the_weights_and_cost_little(large_family: Family, figure: Figure) -> None:
    """Outside an offset the weights are bit for bit as before; a step's time and memory are printed."""
    tokens = torch.randint(0, 128, (8, 512), generator=torch.Generator().manual_seed(0)).to(GPU)
    taken: dict[str, float] = {}
    peaks: dict[str, float] = {}
    slopes: dict[str, torch.Tensor] = {}
    for name in ("adamw", "mergopt", "mergopt in layers"):
        model = _model(large_family)
        inner = torch.optim.AdamW(model.parameters(), lr=0.0)
        optimizer: torch.optim.Optimizer = inner
        if name != "adamw":
            optimizer = MergOPT(inner, seed=3, model=model if name.endswith("layers") else None)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        closure = _closure(model, tokens)
        if isinstance(optimizer, MergOPT):
            with optimizer.offset() as draw:
                closure()
            assert draw.factor != 0
            slopes[name] = model.lm_head.weight.grad.detach().float().clone()
        for _ in range(3):
            optimizer.step(closure)
        torch.cuda.synchronize()
        assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), before, strict=True))
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(10):
            optimizer.step(closure)
        torch.cuda.synchronize()
        taken[name] = (time.perf_counter() - began) / 10
        peaks[name] = torch.cuda.max_memory_allocated() / 2**20
        del model, inner, optimizer, before, closure
        torch.cuda.empty_cache()
    error = (slopes["mergopt"] - slopes["mergopt in layers"]).norm() / slopes["mergopt"].norm()
    assert error < 1e-2  # bfloat16
    figure(
        "a step of 76M parameters on 4,096 tokens: "
        + "; ".join(f"{name} {1e3 * taken[name]:.1f} ms, peak {peaks[name]:.0f} MiB" for name in taken)
    )


def test_activations_for_alignments_are_those_of_the_cpu(float_family: Family) -> None:
    """Activations that a GPU reads are the CPU's but for rounding."""
    from transformers import AutoModelForCausalLM

    from workers.alignments.activations import read_activations

    prompts = [[5 + i, 17, 40 + i, 8, 9] for i in range(10)]
    model = AutoModelForCausalLM.from_pretrained(float_family.base.directory, dtype=torch.float32).eval()
    theirs = read_activations(model, prompts)
    ours = read_activations(model.to(GPU), prompts)
    compared = 0
    for name, expected in vars(theirs).items():
        found = getattr(ours, name)
        if isinstance(expected, torch.Tensor) and expected.is_floating_point():
            assert torch.allclose(found.cpu(), expected, rtol=1e-3, atol=1e-4), name
            compared += 1
    assert compared >= 1
