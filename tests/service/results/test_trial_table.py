"""Sorting and filtering of trials."""

from __future__ import annotations

import time
from typing import Any

import pytest

from search_spaces.objectives import Objective
from service.errors import InvalidQuery
from service.results.trial_table import MAX_CONDITIONS, TrialTable
from service.types import Origin, RecipeDigest, RungRecord, TrialResult, TrialState

OBJECTIVES = (Objective("math", "acc", "maximize"), Objective("loss", "loss", "minimize", (0.0, 9.0)))


def trial(number: int, state: TrialState, *values: float, label: str = "") -> TrialResult:
    """A trial with a value of math at each finished rung, and a tenth of that value as loss."""
    rungs = tuple(
        RungRecord(rung, {"math": 10 * 3**rung, "loss": 1}, {"math": value, "loss": value / 10}, {})
        for rung, value in enumerate(values)
    )
    last = rungs[-1].values if rungs and state is TrialState.COMPLETE else {}
    origin = Origin.SOURCE if label.startswith("expert") else Origin.SEARCH
    return TrialResult(
        number, origin, label or f"trial:{number}", state, RecipeDigest(str(number)), rungs=rungs, values=last
    )


TRIALS = (
    trial(0, TrialState.COMPLETE, 0.3, 0.3, label="expert:Math"),
    trial(1, TrialState.PRUNED, 0.9),
    trial(2, TrialState.COMPLETE, 0.8, 0.6),
    trial(3, TrialState.FAIL),
    trial(4, TrialState.COMPLETE, 0.2, 0.6),
)
CONFIGURATIONS: dict[int, dict[str, Any]] = {1: {"scale": 0.5}, 2: {"scale": "all"}, 4: {"scale": 2}}
TABLE = TrialTable(TRIALS, lambda: CONFIGURATIONS, OBJECTIVES)


@pytest.mark.parametrize(
    ("sort", "numbers"),
    [
        ("number", [0, 1, 2, 3, 4]),
        ("-number", [4, 3, 2, 1, 0]),
        ("-value.math", [2, 4, 0, 1, 3]),
        ("math", [0, 2, 4, 1, 3]),
        ("-mean", [2, 4, 0, 1, 3]),
        ("value.loss", [0, 2, 4, 1, 3]),
        ("samples", [1, 0, 2, 4, 3]),
        ("-samples", [0, 2, 4, 1, 3]),
        ("parameter.scale", [1, 4, 2, 0, 3]),
        ("-parameter.scale", [2, 4, 1, 0, 3]),
        ("state", [0, 2, 4, 3, 1]),
    ],
)
def test_the_field_sorts(sort: str, numbers: list[int]) -> None:
    """By values, trials at full budget are first; equal ones are in order of number, and those without one are last."""
    assert TABLE.select(sort=sort) == numbers


@pytest.mark.parametrize(
    ("conditions", "numbers"),
    [
        ({"where": ["math>=0.6"]}, [1, 2, 4]),
        ({"where": ["value.math > 0.6"]}, [1]),
        ({"where": ["math=0.6,samples!=31"]}, []),
        ({"where": ["rung<1"]}, [1]),
        ({"where": ["rung!=0"]}, [0, 2, 4]),
        ({"where": ["rung>=0", "number<2"]}, [0, 1]),
        ({"where": ["origin=source"]}, [0]),
        ({"where": ["origin!=source"]}, [1, 2, 3, 4]),
        ({"where": ["state=complete"]}, [0, 2, 4]),
        ({"where": ["parameter.scale>=0.5"]}, [1, 4]),
        ({"where": ["parameter.scale=all"]}, [2]),
        ({"text": "MATH"}, [0]),
        ({"text": "4"}, [4]),
        ({"state": "PRUNED"}, [1]),
        ({"origin": "search", "state": "COMPLETE"}, [2, 4]),
    ],
)
def test_conditions_keep_trials(conditions: dict[str, Any], numbers: list[int]) -> None:
    """A trial without a value of the field satisfies no condition on it."""
    assert TABLE.select(**conditions) == numbers


def test_configurations_are_read_only_for_parameters() -> None:
    """Reading the configurations of all trials takes time, which only parameters need."""

    def refuse() -> Any:
        raise AssertionError("read")

    table = TrialTable(TRIALS, refuse, OBJECTIVES)
    assert table.select(sort="-mean", where=["math>=0.6"])
    with pytest.raises(AssertionError, match="read"):
        table.select(sort="parameter.scale")


def test_configurations_are_read_once() -> None:
    """Conditions on several parameters, and a parameter to sort by, read the configurations once."""
    reads = []

    def read() -> dict[int, dict[str, Any]]:
        reads.append(1)
        return CONFIGURATIONS

    table = TrialTable(TRIALS, read, OBJECTIVES)
    assert table.select(sort="parameter.scale", where=["parameter.scale>0", "parameter.scale<=2"]) == [1, 4]
    assert len(reads) == 1


@pytest.mark.parametrize("text", ["math", "=1", "!=1", "math=", "math>>1", "math=<1", "a!b>1", " > "])
def test_other_texts_are_no_conditions(text: str) -> None:
    """A condition has a field, an operator and a value."""
    with pytest.raises(InvalidQuery, match="is not FIELD, one of") as refused:
        TABLE.select(where=[text])
    assert refused.value.parameter == "where"


def test_long_texts_are_refused_at_once() -> None:
    """The time to refuse a text grows linearly with its length, also for spaces between words."""
    begin = time.process_time()
    with pytest.raises(InvalidQuery, match="is not FIELD, one of"):
        TABLE.select(where=["a" + " " * 40_000 + "b"])
    assert time.process_time() - begin < 2


def test_the_number_of_conditions_is_limited() -> None:
    """Conditions in one text and in several count together."""
    most = ["number>=0,number<9"] * (MAX_CONDITIONS // 2)
    assert TABLE.select(where=most) == [0, 1, 2, 3, 4]
    with pytest.raises(InvalidQuery, match=f"has {MAX_CONDITIONS + 1} conditions; give at most {MAX_CONDITIONS}"):
        TABLE.select(where=[*most, "number<8"])
