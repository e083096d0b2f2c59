"""The layer path of the best trial: the same steps in the API's JSON and in the report."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Source
from service.results.load import run_record
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.series.coefficients import coefficients
from service.results.series.path import layer_path, path
from tests.service.paths_study import paths_study
from tests.service.synthetic_run import best_of
from tests.service.synthetic_run import run_record as other_record


def step(model: str, layer: int, scale: float = 1.0, weights: float = 1.0) -> LayerRecipe:
    merge = Merge("passthrough", (Source(model, layer),))
    own = replace(merge, coefficients={"scale": weights}) if weights != 1 else merge
    return LayerRecipe(own, own, merge, scale=scale)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """A study whose best trial repeats a layer, uses a layer of another model, and has scales."""
    found = run_record(*paths_study(tmp_path_factory.mktemp("paths")))
    best = best_of(found)
    layers = (step("math", 0, 0.75), step("math", 1), step("text", 1, 1.5), step("text", 2), step("math", 3))
    known = {"base": "b0", "math": "m1", "text": "t2"}
    recipe = replace(best.read_recipe(), layers=layers, models=known)
    return replace(found, trials=tuple(replace(t, recipe=recipe) if t is best else t for t in found.trials))


def test_a_step_is_a_layer_of_one_model_or_a_merge() -> None:
    mixed = Merge("linear", (Source("math", 0), Source("text", 0)), {"weight": (0.5, 0.5)})
    found = layer_path((step("math", 3, 0.5, 1.25), LayerRecipe(mixed, mixed, mixed), step("base", 1)))
    assert [(s.position, s.model, s.layer, s.scale, s.weights) for s in found] == [
        (0, "math", 3, 0.5, 1.25),
        (1, None, None, 1.0, 1.0),
        (2, "base", 1, 1.0, 1.0),
    ]


def test_the_series_is_the_path_of_the_best_trial(run: RunRecord) -> None:
    document = path.document(run)
    assert not document["is_plain"]
    assert document["models"] == ["math", "text"]
    steps = [(s["model"], s["layer"], s["scale"]) for s in document["steps"]]
    assert steps == [("math", 0, 0.75), ("math", 1, 1.0), ("text", 1, 1.5), ("text", 2, 1.0), ("math", 3, 1.0)]


def test_the_report_draws_every_step_of_the_series(run: RunRecord) -> None:
    html = render_report(run)
    assert "<h3>Layer path</h3>" in html
    titles = re.findall(r"<title>(position \d+: [^<]*)</title>", html)
    assert titles == [
        "position 0: math, layer 0, output times 0.750",
        "position 1: math, layer 1",
        "position 2: text, layer 1, output times 1.500",
        "position 3: text, layer 2",
        "position 4: math, layer 3",
    ]
    assert "3 layers are not at their own position" in html
    assert 'class="cell minus" style="--v:50%"' in html
    assert 'class="cell plus" style="--v:100%"' in html


def test_scales_of_mlps_are_in_the_series_and_in_the_report(run: RunRecord) -> None:
    best = best_of(run)
    layers = (step("math", 0), replace(step("math", 1), mlp_scale=0.0), replace(step("math", 2), mlp_scale=1.75))
    recipe = replace(best.read_recipe(), layers=layers)
    scaled = replace(run, trials=tuple(replace(t, recipe=recipe) if t is best else t for t in run.trials))
    document = path.document(scaled)
    assert not document["is_plain"], "the layers are at their own positions, but two are scaled"
    assert [(s["scale"], s["mlp_scale"]) for s in document["steps"]] == [(1.0, 1.0), (1.0, 0.0), (1.0, 1.75)]
    html = render_report(scaled)
    assert re.findall(r"<title>(position \d+: [^<]*)</title>", html) == [
        "position 0: math, layer 0",
        "position 1: math, layer 1, MLP times 0.000",
        "position 2: math, layer 2, MLP times 1.750",
    ]
    # The colours reach as far as the scales.
    assert 'class="cell minus" style="--v:100%"' in html
    assert 'class="cell plus" style="--v:75%"' in html
    assert re.search(r'class="after">0<span class="ramp"[^>]*></span>2</p>', html)
    assert "Colours are the factor of the layer's MLP; " in html
    assert '<th scope="col">MLP</th>' in html
    assert '<th scope="col">MLP</th>' not in render_report(run)
    assert re.search(r'class="after">0.5<span class="ramp"[^>]*></span>1.5</p>', render_report(run))
    for note in ("scale of the MLP 0.000", "scale of the MLP 1.750"):
        assert note in html


def test_merges_at_their_own_positions_have_no_picture_of_a_path() -> None:
    run = other_record(num_trials=10)
    assert path(run).is_plain
    assert "<h3>Layer path</h3>" not in render_report(run)
    assert path.document(replace(run, trials=()))["steps"] == ()


def test_the_numbers_of_a_path_are_not_shown_as_coefficients(run: RunRecord) -> None:
    best = best_of(run)
    keys = replace(best, configuration={"b1.key.0.math": 0.3, "b1.scale": 1.2})
    shown = replace(run, trials=tuple(keys if trial is best else trial for trial in run.trials))
    assert coefficients(shown).values == ()
