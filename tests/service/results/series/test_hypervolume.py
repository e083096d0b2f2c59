"""The hypervolume over the samples spent."""

from __future__ import annotations

from dataclasses import replace

import pytest

from search_spaces.constraints import parse_constraint
from search_spaces.objectives import Objective
from service.results.documents import pareto
from service.results.record import RunRecord, SearchFigures
from service.results.report.hypervolume import hypervolume_picture
from service.results.series.hypervolume import hypervolume
from service.types import Origin, TrialRecord, TrialState
from tests.service.synthetic_run import run_record

RUN = run_record(num_trials=40)
NAMES = ("math", "text")


def trial(number: int, math: float, text: float, *, scored: int = 20, copy_of: int | None = None) -> TrialRecord:
    """A trial at full budget with these values, and a recipe of its own unless it is a copy."""
    full = next(found for found in RUN.whole_trials if found.state is TrialState.COMPLETE)
    recipe = RUN.whole_trials[number if copy_of is None else copy_of].recipe
    values = {"math": math, "text": text}
    origin = Origin.SOURCE if number == 0 else Origin.SEARCH
    return replace(
        full, number=number, origin=origin, label=f"t{number}", recipe=recipe, values=values, samples_scored=scored
    )


def study(*trials: TrialRecord, charges: dict[int, int] | None = None, constraints: tuple[str, ...] = ()) -> RunRecord:
    of = tuple(map(parse_constraint, constraints))
    objectives = tuple(
        Objective(name, "exact_match", "maximize", None, tuple(c for c in of if c.objective == name)) for name in NAMES
    )
    return replace(RUN, objectives=objectives, trials=trials, search=SearchFigures(charges=charges or {}))


def test_volume_is_of_the_front_so_far() -> None:
    """Each volume is that of the front so far below the reference point."""
    run = study(trial(0, 0.5, 0.5), trial(1, 0.4, 0.4), trial(2, 0.9, 0.3), trial(3, 0.5, 0.5, copy_of=0, scored=0))
    plot = hypervolume(run)
    assert plot.reference_point == [1.1, 1.1]
    # By costs: (0.5, 0.5), then also (0.1, 0.7); the second trial is dominated, the last one is the first again.
    expected = (0.6 * 0.6, 0.6 * 0.6, 0.6 * 0.6 + 0.4 * 0.4)
    assert [point.hypervolume for point in plot.points] == pytest.approx(expected)
    assert [point.trial for point in plot.points] == [0, 1, 2]


def test_spent_samples_include_steps() -> None:
    """The spent samples are those of all trials so far and of the steps for their proposals."""
    stopped = replace(trial(1, 0.4, 0.4, scored=7), state=TrialState.PRUNED, values={})
    run = study(trial(2, 0.9, 0.3), trial(0, 0.5, 0.5), stopped, charges={1: 30, 2: 4, 3: 1000})
    plot = hypervolume(run)
    assert plot.baselines_spent == 20
    assert [(point.trial, point.spent) for point in plot.points] == [(0, 20), (2, 20 + 7 + 30 + 20 + 4)]


@pytest.mark.parametrize("constraints", [(), ("math >= 0.6",), ("math >= 0.99",)])
def test_the_last_volume_is_that_of_the_studys_front(constraints: tuple[str, ...]) -> None:
    run = study(
        *(trial(n, 0.3 + n * 37 % 11 / 20, 0.2 + n * 23 % 7 / 10, scored=5) for n in range(15)), constraints=constraints
    )
    assert hypervolume(run).points[-1].hypervolume == pytest.approx(pareto(run)["hypervolume"])
    assert hypervolume(RUN).points[-1].hypervolume == pytest.approx(pareto(RUN)["hypervolume"])


def test_with_one_objective_there_is_no_volume_to_draw() -> None:
    run = replace(RUN, objectives=RUN.objectives[:1])
    assert hypervolume(run).points == ()
    assert hypervolume_picture(run) is None
    assert hypervolume_picture(replace(RUN, trials=())) is None


def test_the_report_draws_the_trials_that_are_new_on_the_front() -> None:
    picture = hypervolume_picture(study(trial(0, 0.5, 0.5), trial(1, 0.4, 0.4), trial(2, 0.9, 0.3)))
    assert picture is not None
    chart = str(picture["chart"])
    assert "<title>t0: 0.360 after 20 samples</title>" in chart
    assert "<title>t2: 0.520 after 60 samples</title>" in chart
    assert "t1:" not in chart
    assert (picture["baselines"], picture["last"]) == (pytest.approx(0.36), pytest.approx(0.52))
