from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Source
from tests.workers.recipes import arithmetic
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.plan import check_recipe, computations, merged_names, plan_tensors
from workers.types import Family


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


def copied(layer: int | None) -> Merge:
    return Merge("passthrough", (Source("text", layer),))


@pytest.mark.parametrize(
    ("name", "merge", "message"),
    [
        (
            "model.layers.9.mlp.up_proj.weight",
            copied(2),
            "tensors: the merged model has no model.layers.9",
        ),
        (
            "model.norm.weight",
            copied(2),
            "model.norm.weight: source 'text' names layer 2; expected no layer",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            copied(7),
            "source 'text' names layer 7; the models have",
        ),
        (
            "model.layers.0.mlp.up_proj.weight",
            copied(None),
            "names layer None; expected a layer",
        ),
    ],
)
def test_single_tensors_that_cannot_be_merged_are_refused(untied: Bank, name: str, merge: Merge, message: str) -> None:
    with pytest.raises(InvalidRecipe, match=message):
        check_recipe(replace(arithmetic(untied.family, 0.3, 0.4), tensors={name: merge}), untied)


def test_a_plan_stands_for_its_recipe_and_is_not_made_again(untied: Bank, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.5)
    expected = dict(merged_tensors(recipe, untied, torch.float32))
    plan = plan_tensors(recipe, untied)
    wanted = computations(recipe, untied)
    monkeypatch.setattr("workers.merging.plan._plan", lambda *_: pytest.fail("planned again"))
    assert plan_tensors(plan, untied) is plan
    assert computations(plan, untied) == wanted
    assert merged_names(plan, untied) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    found = dict(merged_tensors(plan, untied, torch.float32))
    written = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
    merge_into(plan, untied, written)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(written[name], tensor) for name, tensor in expected.items())
