"""The series of a recipe: runs of layers with equal merges, and every model's share."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Source
from service.results.series.recipe import layer_runs, model_shares, recipe
from tests.service.synthetic_run import best_of, run_record


def test_layers_are_one_run_only_where_they_take_the_same_steps() -> None:
    def layer(model: str, source: int, scale: float = 1.0) -> LayerRecipe:
        merge = Merge("passthrough", (Source(model, source),))
        return LayerRecipe(merge, merge, merge, scale=scale)

    layers = [layer("a", 0), layer("a", 1), layer("a", 1), layer("b", 3), layer("b", 4, scale=1.2)]
    assert [(start, stop) for start, stop, _ in layer_runs(layers)] == [(0, 2), (2, 3), (3, 4), (4, 5)]


def test_shares_follow_coefficients() -> None:
    three = tuple(Source(name, 0) for name in "abc")
    assert model_shares(Merge("task_arithmetic", three, {"lambda": (0.5, 0.25, 0.25)})) == {
        "a": 0.5,
        "b": 0.25,
        "c": 0.25,
    }
    assert model_shares(Merge("slerp", three[:2], {"t": 0.3})) == pytest.approx({"a": 0.7, "b": 0.3})
    assert model_shares(Merge("ties", three[:2], {"lambda": 1.0, "k": 0.2})) == {"a": 0.5, "b": 0.5}
    assert model_shares(Merge("linear", three[:2], {"weight": (0.0, 0.0)})) == {"a": 0.0, "b": 0.0}


def test_the_series_has_the_single_tensors_of_the_best_recipe() -> None:
    run = run_record(num_trials=10)
    assert recipe(run).tensors == {}
    best = best_of(run)
    own = Merge("task_arithmetic", (Source("math"), Source("text")), {"lambda": (0.3, 0.1)})
    finer = replace(best, recipe=replace(best.read_recipe(), tensors={"model.norm.weight": own}))
    trials = tuple(finer if trial.number == best.number else trial for trial in run.trials)
    picture = recipe(replace(run, trials=trials)).tensors["model.norm.weight"]
    assert (picture.method, picture.coefficients) == ("task_arithmetic", {"lambda": [0.3, 0.1]})
    assert picture.sources == ["math", "text"]
    assert picture.shares == pytest.approx({"math": 0.75, "text": 0.25})


def test_the_series_has_the_scales_of_each_run_of_layers() -> None:
    run = run_record(num_trials=10)
    best = best_of(run)
    whole = best.read_recipe()
    first, *rest = whole.layers
    scaled = replace(best, recipe=replace(whole, layers=(replace(first, scale=1.5, mlp_scale=0.5), *rest)))
    trials = tuple(scaled if trial.number == best.number else trial for trial in run.trials)
    runs = recipe(replace(run, trials=trials)).layers
    assert [(each.scale, each.mlp_scale) for each in runs] == [(1.5, 0.5)] + [(1.0, 1.0)] * (len(runs) - 1)
