"""Losses and gradients along layer paths: the model has the path's layers, and derivatives are those of its loss."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from tests.workers.recipes import arithmetic, num_layers
from workers.engines.transformers.merged_models import merged_model
from workers.training.gradients import CoefficientGradients
from workers.training.losses import sample_losses
from workers.types import Family, TaskSpec

OPTIONS = EngineOptions(max_model_len=256, dtype="float32")
BATCH = {"sums": (0, 3, 5, 8)}
WEIGHTS = {"sums": 1.0}


def along(family: Family, numbers: tuple[int, ...], lambdas: tuple[float, ...]) -> Recipe:
    """A path, given by numbers of layers, with task arithmetic in each of its layers."""

    def merge(layer: int | None) -> Merge:
        sources = tuple(Source(expert.alias, layer) for expert in family.experts)
        return Merge("task_arithmetic", sources, {"lambda": lambdas})

    layers = tuple(LayerRecipe(merge(n), merge(n), merge(n), scale=1.0 + 0.1 * (n % 2)) for n in numbers[:-1])
    last = merge(numbers[-1])
    return Recipe(
        family.fingerprints, family.base.alias, (*layers, LayerRecipe(last, last, last)), merge(None), merge(None)
    )


@pytest.fixture(scope="module", params=["untied", "tied"])
def trained(request: pytest.FixtureRequest, sums: TaskSpec) -> CoefficientGradients:
    return CoefficientGradients(request.getfixturevalue(f"{request.param}_family"), OPTIONS, {"sums": sums})


def path_of(trained: CoefficientGradients, *lambdas: float, is_longer: bool = True) -> Recipe:
    """A path that repeats a layer and exchanges two others, longer or shorter than the models."""
    family = trained.bank.family
    count = num_layers(family)
    numbers = (0, 1, 0, *range(2, count), count - 1) if is_longer else (1, 0, count - 1)
    return along(family, numbers, lambdas or (0.3, 0.6))


@pytest.mark.parametrize("is_longer", [True, False])
def test_losses_are_those_of_the_exported_path(trained: CoefficientGradients, is_longer: bool) -> None:
    """The losses of a path are those of the model that transformers loads for it."""
    recipe = path_of(trained, is_longer=is_longer)
    found = trained.losses(recipe, BATCH)["sums"]
    module = merged_model(recipe, trained.bank, dtype="float32")

    def logits(tokens: torch.Tensor, last: int) -> torch.Tensor:
        whole: torch.Tensor = module(input_ids=tokens, logits_to_keep=last).logits[:, -last:]
        return whole

    of_task: Any = trained._of_tasks["sums"]
    whole: Any = SimpleNamespace(logits=logits, device=torch.device("cpu"))
    with torch.no_grad():
        expected = sample_losses(whole, [of_task.at[position] for position in BATCH["sums"]]) / of_task.unit
    assert found == pytest.approx(expected.tolist(), rel=1e-4)


@pytest.mark.parametrize("is_longer", [True, False])
def test_derivatives_along_a_path(trained: CoefficientGradients, is_longer: bool) -> None:
    """The derivative by all coefficients of an expert is that of finite differences; the same for a scale."""
    result = trained.loss_and_gradient(path_of(trained, is_longer=is_longer), BATCH, WEIGHTS, by_scales=True)
    first = trained.bank.family.experts[0].alias

    def loss(recipe: Recipe) -> float:
        each = trained.losses(recipe, BATCH)["sums"]
        return sum(each) / len(each)

    step = 5e-3
    high, low = (loss(path_of(trained, 0.3 + s, 0.6, is_longer=is_longer)) for s in (step, -step))
    slope = sum(of_models[first] for of_models in result.by_source.values())
    assert slope == pytest.approx((high - low) / (2 * step), rel=0.02)

    recipe = path_of(trained, is_longer=is_longer)
    differences = []
    for moved in (step, -step):
        layers = list(recipe.layers)
        layers[1] = replace(layers[1], scale=layers[1].scale + moved)
        differences.append(loss(replace(recipe, layers=tuple(layers))))
    assert result.layer_scales[1] == pytest.approx((differences[0] - differences[1]) / (2 * step), rel=0.05, abs=1e-4)


def test_paths_and_models_follow_each_other(trained: CoefficientGradients) -> None:
    """Losses do not depend on the layers of the merge before."""
    family = trained.bank.family
    merges = (arithmetic(family, 0.4, 0.2), path_of(trained), path_of(trained, is_longer=False))
    before = [trained.losses(recipe, BATCH) for recipe in merges]
    assert [trained.losses(recipe, BATCH) for recipe in reversed(merges)] == before[::-1]
    assert len({tuple(each["sums"]) for each in before}) == len(merges)
