"""The gradient actor: from derivatives by coefficients to those by the parameters of a space."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from search_spaces.spaces.base import DifferentiableSpace
from search_spaces.spaces.sfs import SfsSection
from service.store.steps import GradientRequest, GradientResult, LossesRequest
from service.studies.preflight.models import searched_models
from service.tune.proposing.gradient_actor import GradientActor, GradientInputs
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
