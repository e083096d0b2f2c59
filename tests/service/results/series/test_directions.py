"""Directions and scales of a study in the space m3: in the chart, in trials.jsonl and in the report."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from search_spaces.directions import direction_of
from search_spaces.recipe import Merge, Recipe, Source
from search_spaces.spaces.base import SearchedModels
from search_spaces.spaces.m3 import M3Section
from service.results.files import trials_jsonl
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.selection import best_trial
from service.results.series.directions import directions
from service.types import Origin, TrialRecord, TrialState
from tests.service.synthetic_run import EXPERTS, FINGERPRINTS, NUM_LAYERS, run_record

MODELS = SearchedModels(base="base", experts=EXPERTS, fingerprints=FINGERPRINTS, num_layers=NUM_LAYERS, tensors={})


@pytest.fixture(scope="module")
def run() -> RunRecord:
    """A study with proposals from the space m3; its values are those of the made-up study."""
    usual = run_record(num_trials=60)
    space, rng = M3Section(kind="m3").build(MODELS), np.random.default_rng(0)
    trials = []
    for trial in usual.whole_trials:
        if trial.origin is Origin.SEARCH:
            configuration = space.parameters.sample(rng)
            trial = replace(trial, configuration=configuration, recipe=space.to_recipe(configuration))
        trials.append(trial)
    document = {**usual.study.document, "search_space": {"kind": "m3"}}
    return replace(usual, trials=tuple(trials), study=replace(usual.study, document=document))


def head(merge: Merge) -> Recipe:
    return Recipe.uniform(merge, models=FINGERPRINTS, base="base", num_layers=1)


def test_direction_and_scale_are_those_of_equation_2() -> None:
    sources = (Source("math"), Source("text"))
    lambdas = direction_of(head(Merge("task_arithmetic", sources, {"lambda": (0.3, 1.2)})))
    assert lambdas is not None
    assert lambdas.shares == pytest.approx({"math": 0.2, "text": 0.8})
    assert lambdas.scale == pytest.approx(1.5)
    weights: dict[str, float | tuple[float, ...]] = {"weight": (1.0, 3.0), "lambda": 1.7, "k": 0.5}
    ties = direction_of(head(Merge("m3_ties", sources, weights)))
    assert ties is not None
    assert (ties.shares, ties.scale) == ({"math": 0.25, "text": 0.75}, 1.7)
    average = direction_of(head(Merge("linear", sources, {"weight": 1.0})))
    assert average is not None
    assert (average.shares, average.scale) == ({"math": 0.5, "text": 0.5}, None)
    plain = direction_of(head(Merge("ties_majority", sources, {"lambda": 0.9, "k": 0.5})))
    assert plain is not None
    assert (plain.shares, plain.scale) == ({"math": 0.5, "text": 0.5}, 0.9)
    alone = direction_of(head(Merge("passthrough", (Source("math"),))))
    assert alone is not None
    assert alone.shares == {"math": 1.0}
    assert direction_of(head(Merge("passthrough", (Source("base"),)))) is None
    assert direction_of(head(Merge("slerp", sources, {"t": 0.5}))) is None


def test_every_merge_at_full_budget_has_its_direction(run: RunRecord) -> None:
    plot = directions(run)
    complete = [t for t in run.trials if t.state is TrialState.COMPLETE and t.origin is not Origin.SOURCE]
    assert [point.trial for point in plot.points] == [trial.number for trial in complete]
    for point in plot.points:
        assert sum(point.shares.values()) == pytest.approx(1, abs=1e-5)
    searched = [point for point in plot.points if point.origin == "search"]
    assert any(point.p is not None for point in searched)
    assert all((point.order is None) == (not point.p) for point in searched)
    whole = {trial.number: trial for trial in run.whole_trials}
    for point in searched:
        configuration = whole[point.trial].configuration
        assert configuration is not None
        assert point.method == configuration["method"]
        if point.scale is not None:
            assert point.scale == pytest.approx(configuration["scale"], abs=1e-5)


def test_the_best_of_each_method_with_and_without_the_search(run: RunRecord) -> None:
    plot = directions(run)
    keys = [(point.method, point.origin == "published") for point in plot.best]
    assert len(keys) == len(set(keys))
    assert {("task_arithmetic", True), ("linear", True), ("ties", True)} <= set(keys)
    for point in plot.best:
        same = [other.trial for other in plot.points if (other.method, other.origin) == (point.method, point.origin)]
        best = best_trial([trial for trial in run.trials if trial.number in same], run.objectives)
        assert best is not None
        assert best.number == point.trial
    for point in plot.best_of_orders:
        same = [other.trial for other in plot.points if other.order == point.order]
        best = best_trial([trial for trial in run.trials if trial.number in same], run.objectives)
        assert best is not None
        assert best.number == point.trial


def test_shares_are_in_trials_jsonl_of_this_space_alone(run: RunRecord) -> None:
    lines = [json.loads(line) for line in trials_jsonl(run).splitlines()]
    by_number = {line["number"]: line for line in lines}
    assert by_number[0]["shares"] is None
    assert by_number[1]["shares"] == {EXPERTS[0]: 1.0}
    for point in directions(run).points:
        assert by_number[point.trial]["shares"] == point.shares
    assert not any("shares" in json.loads(line) for line in trials_jsonl(run_record(num_trials=9)).splitlines())


def test_the_report_lists_methods_and_draws_p_and_scale(run: RunRecord) -> None:
    page = render_report(run)
    assert '<section id="directions">' in page
    assert "exponent p of the p-series" in page
    assert "scale of the task vectors" in page
    assert f"share of {EXPERTS[0]}" in page
    for point in directions(run).best:
        assert f">{point.method.replace('_', ' ')}</th>" in page
    assert '<section id="directions">' not in render_report(run_record(num_trials=9))
    only_sources = replace(run, trials=tuple(trial for trial in run.trials if trial.origin is Origin.SOURCE))
    assert '<section id="directions">' not in render_report(only_sources)
    assert all(isinstance(trial, TrialRecord) for trial in run.trials)
