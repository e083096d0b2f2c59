"""The gradient actor: derivatives by coefficients become derivatives by the parameters of a space."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.spaces.base import DifferentiableSpace
from search_spaces.spaces.hm3 import Hm3Section, MergedOptions
from search_spaces.spaces.layer_paths import MERGED
from search_spaces.spaces.sfs import SfsSection
from service.store.steps import GradientRequest, GradientResult, LossesRequest
from service.studies.preflight.models import searched_models
from service.tune.proposing.gradient_actor import GradientActor, GradientInputs, _has_room
from service.tune.searchers.adam import numbers_of
from tests.conftest import OPTIONS
from workers.models.family import open_sources
from workers.types import Family, TaskSpec

STEP = 2e-3


def test_scale_gradient_is_of_differences(tied_family: Family, tmp_path: Path) -> None:
    """The gradient in the space of scales equals that of finite differences."""
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(8)))
    sources = open_sources(tied_family)
    space = SfsSection(kind="sfs", model="math").build(searched_models(sources, sources.fingerprints))
    assert isinstance(space, DifferentiableSpace)
    task = TaskSpec({"file": str(file), "max_tokens": 6}, "exact_match")
    actor = GradientActor(GradientInputs(tied_family, OPTIONS, {"sums": task}, space))

    positions = {"sums": tuple(range(8))}
    # One factor is at its default, which recipes leave out.
    point = (1.0, *(0.9 + 0.05 * index for index in range(1, len(space.parameters))))
    request = GradientRequest(label="", descent=0, point=point, positions=positions, weights={"sums": 1.0})
    found = actor.run(request)
    assert isinstance(found, GradientResult)
    gradient = found.gradient
    assert len(gradient) == len(point)
    differences = []
    for index in range(len(point)):
        moved = (tuple(x + s * (i == index) for i, x in enumerate(point)) for s in (STEP, -STEP))
        high, low = (
            actor.run(LossesRequest(label="", point=each, positions=positions)).losses["sums"] for each in moved
        )
        differences.append((high - low) / (2 * STEP))
    assert min(map(abs, differences)) > 1e-5
    assert gradient == pytest.approx(differences, rel=0.02, abs=0.005 * max(map(abs, differences)))


@pytest.mark.parametrize("cores", [1, 4])
def test_the_cpu_computes_with_all_cores_but_one(
    tied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """An actor on the CPU uses the cores that its process may use less one, whatever OMP_NUM_THREADS was."""
    file = tmp_path / "sums.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    task = TaskSpec({"file": str(file), "max_tokens": 6}, "exact_match")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        GradientActor(
            GradientInputs(tied_family, OPTIONS.model_copy(update={"threads": 0}), {"sums": task})
        )._gradients()
        assert torch.get_num_threads() == max(1, cores - 1)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("method", ["dare_ties_l1", "pcb"])
def test_gradient_along_a_path_is_of_differences(tied_family: Family, tmp_path: Path, method: str) -> None:
    """Along a path with merged layers the gradient is that of finite differences; by weights it is that of shares."""
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(8)))
    sources = open_sources(tied_family)
    known = searched_models(sources, sources.fingerprints, preferences=({"math": 0.6, "text": 0.4},))
    merged = MergedOptions.model_validate({"method": method, "strength": 0.8, "density": 0.6})
    space = Hm3Section(kind="hm3", merged=merged, scales=(0.5, 2.0), max_jump=None).build(known)
    paths = space.paths
    count = paths.num_layers
    steps = [(MERGED, 0), ("math", 0), (MERGED, count - 1), ("text", count - 1)]
    path = [paths.step(paths.models.index(model), layer) for model, layer in steps]
    recipe = space.to_recipe(paths.configuration(path, scales=(1.1, 0.9, 1.0)))
    coefficients = space.coefficients_of(recipe)
    task = TaskSpec({"file": str(file), "max_tokens": 6}, "exact_match")
    actor = GradientActor(GradientInputs(tied_family, OPTIONS, {"sums": task}))
    actor.use_coefficients(coefficients)

    positions = {"sums": tuple(range(8))}
    point = tuple(parameter.default_value for parameter in numbers_of(coefficients.parameters))
    found = actor.run(GradientRequest(label="", descent=0, point=point, positions=positions, weights={"sums": 1.0}))
    assert isinstance(found, GradientResult)
    assert len(found.gradient) == len(point)

    def loss(at: int, step: float) -> float:
        moved = tuple(x + step * (i == at) for i, x in enumerate(point))
        return actor.run(LossesRequest(label="", point=moved, positions=positions)).losses["sums"]

    names = coefficients.parameters.names
    checked = ["layer2.attention.text", "layer2.scale", "head.math"]
    checked += ["layer1.mlp.strength", "embedding.strength"] if method == "pcb" else []
    for name in checked:
        at = names.index(name)
        difference = (loss(at, STEP) - loss(at, -STEP)) / (2 * STEP)
        assert found.gradient[at] == pytest.approx(difference, rel=0.03, abs=2e-4), name
    if method == "dare_ties_l1":
        # Finite differences flip elected signs, which gradients hold fixed. A common factor of all weights, though, has
        # no influence on a merge that is divided by the sum of weights; the merge's strength is no part of it.
        by_weight = [found.gradient[names.index(f"layer1.mlp.{expert}")] for expert in ("math", "text")]
        assert 0.6 * by_weight[0] + 0.4 * by_weight[1] == pytest.approx(0.0, abs=1e-4)
        assert max(map(abs, by_weight)) > 1e-3


@pytest.mark.parametrize(("free", "already", "placement"), [(0, 0, "mapped"), (10**12, 0, "host"), (0, 10**12, "host")])
def test_gpus_read_pinned_memory_that_engines_share(
    tied_family: Family, monkeypatch: pytest.MonkeyPatch, free: int, already: int, placement: str
) -> None:
    """Gradients on GPUs read the sources from shared host memory where there is room, or where engines filled it."""
    monkeypatch.setattr("service.tune.proposing.gradient_actor.free_shared_bytes", lambda: free)
    monkeypatch.setattr("service.tune.proposing.gradient_actor.shared_bytes", lambda name: already)
    monkeypatch.setattr("service.tune.proposing.gradient_actor.free_host_bytes", lambda: free)
    given: dict[str, Any] = {}
    monkeypatch.setattr("workers.training.gradients.CoefficientGradients", lambda *_, **options: given.update(options))
    inputs = GradientInputs(tied_family, OPTIONS, {}, device="cuda", num_gpus=2, tokens=4096)
    GradientActor(inputs)._gradients()
    assert (given["placement"], given["is_shared"]) == (placement, placement == "host")
    assert (given["device"], given["more_devices"], given["max_tokens"]) == ("cuda:0", ["cuda:1"], 4096)
    GradientActor(replace(inputs, device="cpu"))._gradients()
    assert (given["placement"], given["is_shared"], given["device"], given["more_devices"]) == (
        "mapped",
        False,
        "cpu",
        [],
    )


def test_memory_that_a_killed_engine_left_is_free(
    tied_family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor removes files of a killed engine of another family from shared memory, then looks for room."""
    left = tmp_path / f"mergesearch-{os.getuid()}" / "others"
    left.mkdir(parents=True)
    (left / "users").touch()
    monkeypatch.setattr("workers.merging.node.SHARED_MEMORY", tmp_path)
    actor = "service.tune.proposing.gradient_actor"
    monkeypatch.setattr(f"{actor}.free_shared_bytes", lambda: 0 if left.exists() else 10**12)
    monkeypatch.setattr(f"{actor}.free_host_bytes", lambda: 10**12)
    assert _has_room(tied_family)
