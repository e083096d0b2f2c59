"""The model that weights choose from a front: by held-out values if there are any, otherwise by search values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from search_spaces.errors import InvalidPreference
from search_spaces.objectives import Objective
from service.errors import NotFound
from service.results.format import preferred_text
from service.results.preference import choices
from service.results.record import RunRecord
from service.results.selection import pareto_front
from service.types import Comparison, Estimate, TrialState
from tests.service.results.test_holdout import recipe
from tests.service.synthetic_run import run_record

MADE_UP = run_record(num_trials=12, num_objectives=2)


def run_of(values: Mapping[int, tuple[float, float]], held_out: Mapping[int, tuple[float, float]]) -> RunRecord:
    """A run with these trials, given their values of math and text on search data and on holdout data."""
    names = ("math", "text")
    like = next(trial for trial in MADE_UP.trials if trial.state is TrialState.COMPLETE and trial.bracket is not None)
    trials = tuple(
        replace(
            like,
            number=number,
            label=f"trial {number}",
            recipe=recipe(number),
            values=dict(zip(names, pair, strict=True)),
        )
        for number, pair in values.items()
    )
    rows = tuple(
        Comparison(f"trial {n}", n, {name: Estimate(v, 0.01, 9, (v, v)) for name, v in zip(names, pair, strict=True)})
        for n, pair in held_out.items()
    )
    return replace(MADE_UP, trials=trials, holdout=rows)


FRONT = {3: (0.9, 0.5), 4: (0.8, 0.75), 5: (0.6, 0.8)}


@pytest.mark.parametrize(("math", "expected"), [(1.0, 3), (0.8, 3), (0.5, 4), (0.3, 4), (0.1, 5), (0.0, 5)])
def test_more_weight_picks_more_of_an_objective(math: float, expected: int) -> None:
    found = choices(run_of(FRONT, {})).preferred({"math": math, "text": 1 - math})
    assert (found["trial"], found["split"]) == (expected, "search")
    assert found["values"] == dict(zip(("math", "text"), FRONT[expected], strict=True))
    assert found["weights"] == {"math": math, "text": 1 - math}


def test_a_difference_that_is_noise_does_not_decide() -> None:
    """Were gaps taken as shares of the front's own range, a thousandth of math would outweigh half of text."""
    run = run_of({3: (0.801, 0.3), 4: (0.8, 0.9)}, {})
    assert choices(run).preferred({"math": 0.6, "text": 0.4})["trial"] == 4


def test_held_out_values_decide_where_the_front_has_them() -> None:
    held_out = {3: (0.6, 0.5), 4: (0.9, 0.4)}  # 5 was no finalist
    found = choices(run_of(FRONT, held_out)).preferred({"math": 1.0})
    assert (found["trial"], found["values"], found["split"]) == (4, {"math": 0.9, "text": 0.4}, "holdout")
    assert choices(run_of(FRONT, held_out)).preferred({"text": 1})["trial"] == 3
    assert choices(run_of(FRONT, {9: (1.0, 1.0)})).preferred({"text": 1})["split"] == "search"  # not of the front


def test_ties_are_decided_by_the_rest() -> None:
    """Other objectives decide between equal trials, and then the number."""
    assert choices(run_of(FRONT, {3: (0.7, 0.5), 4: (0.7, 0.6)})).preferred({"math": 1})["trial"] == 4
    assert choices(run_of(FRONT, {3: (0.7, 0.6), 4: (0.7, 0.6)})).preferred({"math": 1})["trial"] == 3


def test_an_objective_that_is_minimised_counts_by_its_range() -> None:
    run = run_of(FRONT, {})
    loss = Objective("text", "word_perplexity", "minimize", (0.0, 1.0))
    run = replace(run, objectives=(run.objectives[0], loss))
    assert [trial.number for trial in pareto_front(run.trials, run.objectives)] == [3]
    assert choices(run).preferred({"text": 1})["trial"] == 3


def test_what_are_no_preferences_is_refused() -> None:
    of = choices(run_of(FRONT, {}))
    with pytest.raises(InvalidPreference, match=r"math=0.6, text=0.6 sum to 1.2, not to 1"):
        of.preferred({"math": 0.6, "text": 0.6})
    with pytest.raises(InvalidPreference, match=r"'code' is not an objective; give weights of math, text"):
        of.preferred({"code": 1.0})
    with pytest.raises(NotFound, match="no trial has reached the full budget yet"):
        choices(run_of({}, {})).preferred({"math": 1.0})


def test_people_are_told_which_trial_by_what_values_of_what_data() -> None:
    found = choices(run_of(FRONT, {})).preferred({"math": 0.5, "text": 0.5})
    assert preferred_text(found) == ("preferred by math=0.5,text=0.5: trial 4, math 0.800, text 0.750 on search data")
    assert preferred_text({**found, "label": "expert:math", "split": "holdout"}) == (
        "preferred by math=0.5,text=0.5: trial 4, expert:math, math 0.800, text 0.750 on held-out data"
    )
