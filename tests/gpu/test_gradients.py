"""Coefficient gradients on a GPU: against finite differences and the CPU, and their memory against the plan."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from service.studies.preflight.gradients import reduction_bytes
from service.studies.preflight.resources import gradient_model_bytes
from tests.gpu.conftest import Figure
from tests.workers.recipes import arithmetic
from workers.training.gradients import CoefficientGradients
from workers.training.memory import pass_bytes
from workers.types import Family, GradientResult, TaskSpec

pytestmark = [pytest.mark.gpu, pytest.mark.bare]

GPU = "cuda:0"
BATCH = {"sums": range(8)}
WEIGHTS = {"sums": 1.0}


def gradients_of(family: Family, task: TaskSpec, device: str, **options: Any) -> CoefficientGradients:
    dtype = options.pop("dtype", "float32")
    engine = EngineOptions(max_model_len=512, dtype=dtype)
    return CoefficientGradients(family, engine, {"sums": task}, device=device, **options)


def flat(result: GradientResult) -> torch.Tensor:
    each = [slope for _, slopes in sorted(result.by_source.items()) for _, slope in sorted(slopes.items())]
    return torch.tensor(each, dtype=torch.float64)


def moved(recipe: Recipe, layer: int, model: int, by: float) -> Recipe:
    """The recipe with another lambda of one model in the attention of a layer."""
    merge = recipe.layers[layer].attention
    lambdas = list(merge.per_source("lambda"))
    lambdas[model] += by
    changed = replace(merge, coefficients={"lambda": tuple(lambdas)})
    layers = list(recipe.layers)
    layers[layer] = replace(layers[layer], attention=changed)
    return replace(recipe, layers=tuple(layers))


@pytest.mark.parametrize("placement", ["mapped", "host", "gpu"])
def test_derivatives_are_those_of_the_cpu(float_family: Family, sums: TaskSpec, placement: str, figure: Figure) -> None:
    """In float32, losses and derivatives are those of the CPU but for rounding, and repeat bit for bit."""
    recipe = arithmetic(float_family, 0.3, 0.5)
    on_gpu, on_cpu = gradients_of(float_family, sums, GPU, placement=placement), gradients_of(float_family, sums, "cpu")
    found = on_gpu.loss_and_gradient(recipe, BATCH, WEIGHTS)
    expected = on_cpu.loss_and_gradient(recipe, BATCH, WEIGHTS)
    again = on_gpu.loss_and_gradient(recipe, BATCH, WEIGHTS)
    assert found.losses["sums"] == pytest.approx(expected.losses["sums"], rel=1e-5)
    error = (flat(found) - flat(expected)).norm() / flat(expected).norm()
    figure(f"derivatives in float32, sources {placement}: GPU and CPU differ by {error:.1e} of their norm")
    assert error < 1e-4
    assert torch.equal(flat(found), flat(again))
    assert found.losses == again.losses


def test_derivatives_are_finite_differences(float_family: Family, sums: TaskSpec) -> None:
    """The derivative by each lambda of a layer's attention is the slope between two losses."""
    trained = gradients_of(float_family, sums, GPU)
    recipe = arithmetic(float_family, 0.3, 0.5)
    step = 0.02
    found = trained.loss_and_gradient(recipe, BATCH, WEIGHTS)

    def loss(at: Recipe) -> float:
        losses = trained.losses(at, BATCH)["sums"]
        return sum(losses) / len(losses)

    compared = 0
    for layer in (0, 2):
        for model, expert in enumerate(float_family.experts):
            names = [name for name in found.by_source if f"layers.{layer}.self_attn." in name]
            slope = sum(found.by_source[name][expert.alias] for name in names)
            ahead, behind = loss(moved(recipe, layer, model, step)), loss(moved(recipe, layer, model, -step))
            assert slope == pytest.approx((ahead - behind) / (2 * step), rel=0.02, abs=2e-3), (layer, expert.alias)
            compared += abs(slope) > 0.01
    assert compared >= 2


def test_bfloat16_points_the_same_way(float_family: Family, sums: TaskSpec, figure: Figure) -> None:
    """`dtype: auto` computes in bfloat16 on a GPU; its derivatives point where those of float32 do."""
    recipe = arithmetic(float_family, 0.3, 0.5)
    exact = flat(gradients_of(float_family, sums, GPU).loss_and_gradient(recipe, BATCH, WEIGHTS))
    coarse_model = gradients_of(float_family, sums, GPU, dtype="auto")
    assert coarse_model.dtype == torch.bfloat16
    coarse = flat(coarse_model.loss_and_gradient(recipe, BATCH, WEIGHTS))
    cosine = float(exact @ coarse / exact.norm() / coarse.norm())
    figure(f"derivatives in bfloat16 and float32: cosine {cosine:.4f}, norms {float(coarse.norm() / exact.norm()):.3f}")
    assert cosine > 0.97


@pytest.mark.parametrize("recomputes", [False, True])
def test_memory_by_tokens_is_within_the_plan(
    large_family: Family, long_texts: TaskSpec, recomputes: bool, figure: Figure
) -> None:
    """The peak of a step is at most the plan's, for several numbers of tokens in one forward pass."""
    settings: Mapping[str, Any] = json.loads((Path(large_family.base.directory) / "config.json").read_text())
    recipe = arithmetic(large_family, 0.3, 0.5)
    lines, over = [], []
    for tokens in (2048, 8192, 16384):
        trained = gradients_of(
            large_family, long_texts, GPU, dtype="bfloat16", recomputes=recomputes, max_tokens=tokens
        )
        samples = range(tokens // 512)
        trained.loss_and_gradient(recipe, {"sums": samples}, WEIGHTS)  # what libraries allocate once
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        trained.loss_and_gradient(recipe, {"sums": samples}, WEIGHTS)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        used = torch.cuda.max_memory_allocated() - held
        sources = trained.bank.sources
        model = gradient_model_bytes(sources, 2) - 2 * sources.num_parameters  # the model itself is held before
        planned = pass_bytes(settings, tokens, 2, recomputes=recomputes) + model + reduction_bytes(sources)
        lines.append(f"{tokens} tokens {used / 2**20:.0f} of {planned / 2**20:.0f} MiB in {seconds:.2f} s")
        if used > planned:
            over.append(tokens)
        del trained
    figure(f"gradients of 76M parameters, {'recomputed' if recomputes else 'kept'} activations: " + "; ".join(lines))
    assert not over
