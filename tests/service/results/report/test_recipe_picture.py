"""The picture of a recipe."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.recipe import Merge, Source
from service.results.report.recipe_picture import recipe_picture
from tests.service.synthetic_run import best_of, run_record


def test_recipe_picture_has_a_row_per_run_of_equal_layers() -> None:
    run = run_record()
    best = best_of(run)
    drawn = recipe_picture(best.read_recipe(), experts=("text", "math"))
    assert [row["name"] for row in drawn["rows"]] == [
        "layers 0 to 1",
        "layers 2 to 3",
        "layers 4 to 5",
        "layers 6 to 7",
    ]
    assert drawn["models"] == ["text", "math", "lookup"]
    assert len(drawn["contributions"]) == 6
    for row in drawn["contributions"]:
        assert sum(row["shares"]) == pytest.approx(1)


def test_single_tensors_are_listed_with_their_own_coefficients() -> None:
    run = run_record()
    whole = best_of(run).read_recipe()
    assert recipe_picture(whole)["tensors"] == []
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1)]
    sources = (Source("math", 0), Source("text", 0))
    own = Merge("task_arithmetic", sources, {"lambda": (0.75, 0.25)})
    drawn = recipe_picture(replace(whole, tensors=dict.fromkeys(names, own)), experts=("text", "math"))
    assert [tensor["name"] for tensor in drawn["tensors"]] == names
    assert [source["text"] for source in drawn["tensors"][0]["cell"]["sources"]] == ["0.25", "0.75"]
    last = drawn["contributions"][-1]
    assert last["name"] == "single tensors"
    assert dict(zip(drawn["models"], last["shares"], strict=True)) == pytest.approx(
        {"text": 0.25, "math": 0.75, "lookup": 0}
    )
