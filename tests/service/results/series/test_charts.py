"""Charts: discovered without a list, and with the same series in the report and in the API's JSON."""

from __future__ import annotations

import pkgutil
import re
from dataclasses import is_dataclass, replace
from typing import Any

import pytest

from search_spaces.objectives import Objective
from service.results import series
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.series import CHARTS
from service.results.series.base import chart
from service.results.series.front import front
from service.results.series.history import HistoryPlot, history
from service.results.statistics import estimate
from service.types import RungRecord
from tests.service.synthetic_run import run_record

NAMES = [
    *(
        "history",
        "front",
        "holdout",
        "recipe",
        "budget",
        "descents",
        "coefficients",
        "races",
        "hypervolume",
        "path",
        "policies",
        "directions",
        "rungs",
    ),
]


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return run_record(num_trials=20)


def test_every_module_but_base_declares_the_chart_of_its_name() -> None:
    assert sorted([*CHARTS, "base"]) == sorted(module.name for module in pkgutil.iter_modules(series.__path__))
    assert list(CHARTS) == NAMES


@pytest.mark.parametrize("name", list(CHARTS))
def test_chart_is_a_frozen_dataclass(name: str, run: RunRecord) -> None:
    """A chart is a frozen dataclass, and its document names it."""
    drawn = CHARTS[name](run)
    assert is_dataclass(drawn)
    assert type(drawn) is CHARTS[name].series_type
    params: Any = vars(type(drawn))["__dataclass_params__"]
    assert params.frozen
    assert CHARTS[name].document(run)["plot"] == name
    assert CHARTS[name].document(replace(run, trials=(), holdout=()))["plot"] == name


def test_a_declared_chart_takes_name_and_title_from_its_function(run: RunRecord) -> None:
    @chart(place=9)
    def nothing(run: RunRecord) -> HistoryPlot:
        """No trial at all."""
        return HistoryPlot("history", (), ())

    assert (nothing.name, nothing.title, nothing.place) == ("nothing", "No trial at all.", 9)
    assert nothing.document(run) == {"plot": "history", "series": (), "failed": ()}


def test_what_only_the_report_needs_is_not_in_the_document(run: RunRecord) -> None:
    points = CHARTS["history"].document(run)["series"][0]["points"]
    assert points
    assert all(list(point) == ["trial", "label", "origin", "rung", "samples", "value", "is_full"] for point in points)


def test_the_report_draws_the_points_of_the_series(run: RunRecord) -> None:
    html = render_report(run)
    series = CHARTS["history"](run).series
    assert len(series) == 4
    for drawn in series:
        searched = [point for point in drawn.points if point.origin == "search"]
        assert searched
        for point in searched:
            assert f"<title>trial {point.trial}: {point.value:.3f} on {point.samples} samples</title>" in html
    crosses = {int(number) for number in re.findall(r"<title>trial (\d+) failed</title>", html)}
    assert crosses == set(CHARTS["history"](run).failed)


def test_costs_alone_have_a_history_without_samples() -> None:
    """In a study of given recipes whose only objective is a cost, a rung has no samples."""
    run = run_record(num_trials=2)
    rung = RungRecord(0, {}, {"parameters": 5.0}, {"parameters": 0.0})
    trial = replace(run.whole_trials[0], rungs=(rung,), values=rung.values, standard_errors={"parameters": 0.0})
    cost = Objective("parameters", "parameters", "minimize", (0.0, 10.0), cost_of_recipe="parameters")
    (found,) = history(replace(run, objectives=(cost,), trials=(trial,))).series
    assert [(point.trial, point.value, point.samples) for point in found.points] == [(0, 5.0, 0)]


def test_invalid_trials_are_not_the_best_so_far(run: RunRecord) -> None:
    before = history(run).series[0].record
    best = before[-1].trial
    trials = tuple(replace(each, invalid="cut off") if each.number == best else each for each in run.whole_trials)
    after = history(replace(run, trials=trials)).series[0].record
    assert best not in [point.trial for point in after]
    assert after[: len(before) - 1] == before[:-1]


def test_points_of_a_front_have_the_interval_of_the_mean(run: RunRecord) -> None:
    """The interval of the mean of K equal and symmetric intervals is narrower by sqrt(K); one objective has none."""
    full = next(trial for trial in run.trials if trial.values)
    values, errors = dict.fromkeys(full.values, 0.5), dict.fromkeys(full.values, 0.05)
    rung = RungRecord(len(full.rungs) - 1, dict.fromkeys(values, 30), values, errors)
    trial = replace(full, values=values, standard_errors=errors, rungs=(*full.rungs[:-1], rung))
    (point,) = front(replace(run, trials=(trial,))).points
    width = 0.05 * 2.0452 / len(values) ** 0.5
    assert point.mean_interval == pytest.approx([0.5 - width, 0.5 + width], abs=1e-4)
    (alone,) = front(replace(run, objectives=run.objectives[:1], trials=(trial,))).points
    assert alone.mean_interval is None


def test_a_front_has_the_intervals_of_the_list_of_studies(run: RunRecord) -> None:
    """Intervals depend on the number of samples, have a width at the best value, and are exact values' own."""
    first = run.objectives[0]
    full = next(trial for trial in run.trials if trial.values)
    num_samples = 30

    def ends(value: float, error: float | None, objective: Objective = first) -> list[float]:
        values, errors = {**full.values, first.name: value}, {**full.standard_errors, first.name: error}
        rung = RungRecord(len(full.rungs) - 1, dict.fromkeys(values, num_samples), values, errors)
        trial = replace(full, values=values, standard_errors=errors, rungs=(*full.rungs[:-1], rung))
        objectives = (objective, *run.objectives[1:])
        (point,) = front(replace(run, objectives=objectives, trials=(trial,))).points
        return list(point.intervals[first.name])

    high = first.bounds[1]
    assert ends(high, 0.0) == pytest.approx(estimate([high] * num_samples, bounds=first.bounds).ci95)
    middle = ends(0.5, 0.05)
    assert middle == pytest.approx([0.5 - 0.05 * 2.0452, 0.5 + 0.05 * 2.0452], abs=1e-4)  # t of 29 degrees of freedom
    assert ends(0.5, None) == list(first.bounds)
    assert ends(0.5, 0.0, replace(first, cost_of_recipe="layers")) == [0.5, 0.5]
