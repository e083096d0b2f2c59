"""The picture of a recipe: runs of equal layers, and every model's share."""

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Source
from service.results.report.recipe_picture import layer_runs, model_shares, recipe_picture
from service.results.selection import best_trial
from tests.service.synthetic_run import run_record


def test_recipe_picture_has_a_row_per_run_of_equal_layers():
    run = run_record()
    best = best_trial(run.trials, run.objectives)
    drawn = recipe_picture(best.recipe, experts=("text", "math"))
    assert [row["name"] for row in drawn["rows"]] == [
        "layers 0 to 1",
        "layers 2 to 3",
        "layers 4 to 5",
        "layers 6 to 7",
    ]
    assert drawn["models"] == ["text", "math", "lookup"]
    for row in drawn["contributions"]:
        assert sum(row["shares"]) == pytest.approx(1)


def test_layers_are_one_run_only_where_they_take_the_same_steps():
    def layer(model, source, scale=1.0):
        merge = Merge("passthrough", (Source(model, source),))
        return LayerRecipe(merge, merge, merge, scale=scale)

    layers = [layer("a", 0), layer("a", 1), layer("a", 1), layer("b", 3), layer("b", 4, scale=1.2)]
    assert [(start, stop) for start, stop, _ in layer_runs(layers)] == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_shares_follow_coefficients():
    three = tuple(Source(name, 0) for name in "abc")
    assert model_shares(Merge("task_arithmetic", three, {"lambda": (0.5, 0.25, 0.25)})) == {
        "a": 0.5,
        "b": 0.25,
        "c": 0.25,
    }
    assert model_shares(Merge("slerp", three[:2], {"t": 0.3})) == pytest.approx({"a": 0.7, "b": 0.3})
    assert model_shares(Merge("ties", three[:2], {"lambda": 1.0, "k": 0.2})) == {"a": 0.5, "b": 0.5}
    assert model_shares(Merge("linear", three[:2], {"weight": (0.0, 0.0)})) == {"a": 0.0, "b": 0.0}
