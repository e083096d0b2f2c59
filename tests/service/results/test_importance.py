"""Importances of parameters: the parameter with an effect is first, and sums are by layers, part and expert."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search_spaces.objectives import Objective
from service.results import importance
from service.results.importance import importance_columns, importance_plot, importances, scored_trials
from service.types import TrialResult
from tests.service.synthetic_run import run_record

NAMES = (
    *("g1.mlp.ties.lambda", "g1.attention.ties.lambda", "g2.mlp.ties.lambda"),
    *("g2.use.math", "g2.mlp.linear.weight.math"),
)


def study(num_trials: int, *, seed: int = 0) -> tuple[list[TrialResult], dict[int, dict[str, float | bool]]]:
    """Trials whose value depends on the first parameter and less on the third; the last parameter is conditional."""
    rng = np.random.default_rng(seed)
    known = run_record().trials[0]
    trials, configurations = [], {}
    for number in range(num_trials):
        configuration: dict[str, float | bool] = {name: float(rng.uniform()) for name in NAMES[:3]}
        configuration["g2.use.math"] = bool(rng.uniform() < 0.5)
        if configuration["g2.use.math"]:
            configuration[NAMES[4]] = float(rng.uniform())
        value = configuration[NAMES[0]] + 0.3 * configuration[NAMES[2]]
        trials.append(replace(known, number=number, values={"math": value}))
        configurations[number] = configuration
    return trials, configurations


@pytest.mark.parametrize("direction", ["maximize", "minimize"])
def test_what_decides_the_value_is_first(direction: str) -> None:
    """The parameters that decide the objective have almost all of the importance, in both directions."""
    trials, configurations = study(400)
    found = importances(importance_columns(trials, configurations, "math"), "math", direction)
    assert [*found][:2] == [NAMES[0], NAMES[2]]
    assert found[NAMES[0]] > 0.7
    assert set(found) == set(NAMES)
    assert sum(found.values()) == pytest.approx(1)


def test_the_direction_decides_which_trials_are_the_best() -> None:
    """A parameter that matters only among large values has importance only where these are the best."""
    trials, configurations = study(400)

    def value(first: float, second: float) -> float:
        return 2 + second if first > 0.7 else first

    pairs = [[configurations[trial.number][name] for name in NAMES[:2]] for trial in trials]
    changed = [replace(trial, values={"math": value(*pair)}) for trial, pair in zip(trials, pairs, strict=True)]
    columns = importance_columns(changed, configurations, "math")
    largest, least = (importances(columns, "math", direction)[NAMES[1]] for direction in ("maximize", "minimize"))
    assert largest > 0.3 > 5 * least


def test_sums_are_by_layers_part_and_expert() -> None:
    """The sums add up the importances of the parameters that the space assigns to each part."""
    found = dict(zip(NAMES, (0.4, 0.3, 0.1, 0.15, 0.05), strict=True))
    plot = importance_plot(
        run_record().study, Objective("math", "exact_match", "maximize"), found, num_trials=90, num_used=45
    )
    assert plot.parameters is not None
    assert [(each.name, each.layers, each.part, each.expert) for each in plot.parameters][2:] == [
        ("g2.mlp.ties.lambda", "g2", "mlp", None),
        ("g2.use.math", "g2", None, "math"),
        ("g2.mlp.linear.weight.math", "g2", "mlp", "math"),
    ]
    assert [(each.name, each.start, each.stop, each.parameters) for each in plot.layers] == [
        ("g1", 0, 2, 2),
        ("g2", 2, 4, 3),
    ]
    assert [each.importance for each in plot.layers] == pytest.approx([0.7, 0.3])
    assert {each.name: round(each.importance, 9) for each in plot.parts} == {"mlp": 0.55, "attention": 0.3}
    assert {each.name: round(each.importance, 9) for each in plot.experts} == {"math": 0.2}
    assert (plot.trials, plot.used, plot.reason) == (90, 45, None)


def test_equal_values_have_no_importances() -> None:
    """If no parameter matters, all importances are 0 instead of not a number."""
    trials, configurations = study(60)
    same = [replace(trial, values={"math": 0.5}) for trial in trials]
    constant = {number: dict.fromkeys(NAMES[:3], 0.5) for number in configurations}
    assert importances(importance_columns(same, constant, "math"), "math", "maximize") == dict.fromkeys(NAMES[:3], 0.0)


def test_many_numbers_are_thinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above the limit of numbers, trials at equal distances are used; at least the least number of them."""
    trials, configurations = study(400)
    monkeypatch.setattr(importance, "MAX_NUMBERS", 5 * 100)
    columns = importance_columns(trials, configurations, "math")
    assert columns["value.math"] == [trial.values["math"] for trial in trials[::4]]
    monkeypatch.setattr(importance, "MAX_NUMBERS", 1)
    assert len(importance_columns(trials, configurations, "math")["state"]) == importance.MIN_TRIALS


def test_only_valid_trials_at_full_budget_count() -> None:
    """Invalid trials, and those without a value at the full budget, have no part in importances."""
    trials, _ = study(3)
    others = [trials[0], replace(trials[1], invalid="cut off"), replace(trials[2], values={})]
    assert scored_trials(others, "math") == [trials[0]]
    assert scored_trials(others, "text") == []
