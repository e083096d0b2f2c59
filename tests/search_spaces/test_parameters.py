from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.errors import InvalidConfiguration
from search_spaces.parameters import Categorical, Condition, Float, Integer, Parameters

PARAMETERS = Parameters(
    [
        Categorical("method", ("ties", "linear")),
        Float("k", 0.1, 0.99, conditions=(Condition("method", ("ties",)),)),
        Categorical("flag", (True, False), conditions=(Condition("method", ("ties",)),)),
        Integer("depth", 1, 3, conditions=(Condition("flag", (True,)), Condition("method", ("ties", "linear")))),
    ]
)


@given(st.integers(0, 2**32 - 1))
def test_samples_hold_active_parameters(seed: int) -> None:
    """Drawn samples are accepted and hold exactly the active parameters."""
    configuration = PARAMETERS.sample(np.random.default_rng(seed))
    PARAMETERS.check(configuration)
    assert tuple(configuration) == PARAMETERS.active(configuration)
    json.dumps(configuration)


def test_same_seed_samples_the_same_configuration() -> None:
    first, again = (PARAMETERS.sample(np.random.default_rng(7)) for _ in range(2))
    assert first == again


def test_samples_reach_every_choice_and_both_halves_of_a_range() -> None:
    rng = np.random.default_rng(0)
    drawn = [PARAMETERS.sample(rng) for _ in range(300)]
    assert {c["method"] for c in drawn} == {"ties", "linear"}
    assert {c["depth"] for c in drawn if "depth" in c} == {1, 2, 3}
    numbers = [c["k"] for c in drawn if "k" in c]
    assert min(numbers) < 0.3
    assert max(numbers) > 0.8


def test_a_parameter_is_inactive_where_its_parent_is() -> None:
    assert PARAMETERS.active({"method": "linear", "flag": True}) == ("method",)


@pytest.mark.parametrize(
    ("configuration", "message"),
    [
        ({"method": "linear", "deth": 1}, "unknown parameter 'deth'; did you mean 'depth'"),
        ({"method": "linear", "zzz": 1}, "known are method, k, flag, depth"),
        ({}, "'method' is missing; give one of 'ties', 'linear'"),
        ({"method": "tis"}, "method='tis' is not accepted; give one of 'ties', 'linear'"),
        ({"method": "linear", "k": 0.5}, "'k' is given but does not exist here; it exists if method = 'ties'"),
        ({"method": "ties", "k": 1.5, "flag": False}, r"k=1.5 is not accepted; give a number in \[0.1, 0.99\]"),
        ({"method": "ties", "k": float("nan"), "flag": False}, "k=nan is not accepted"),
        ({"method": "ties", "k": "0.5", "flag": False}, "k='0.5' is not accepted"),
        ({"method": "ties", "k": 0.5, "flag": 1}, "flag=1 is not accepted; give one of True, False"),
        ({"method": "ties", "k": 0.5, "flag": True, "depth": 2.0}, "depth=2.0 is not accepted; give a whole number"),
        ({"method": "ties", "k": 0.5, "flag": True, "depth": True}, "depth=True is not accepted"),
        (
            {"method": "ties", "k": 0.5, "flag": False, "depth": 1},
            "it exists if flag = True and method = 'ties' or 'lin",
        ),
    ],
)
def test_what_is_no_configuration_is_refused_with_what_would_be(configuration: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfiguration, match=message):
        PARAMETERS.check(configuration)


def test_both_ends_of_a_range_are_inside() -> None:
    for k in (0.1, 0.99):
        PARAMETERS.check({"method": "ties", "k": k, "flag": False})


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Parameters([Float("a", 0, 1), Float("a", 0, 2)]), "'a' is given twice"),
        (lambda: Parameters([Float("a", 0, 1, conditions=(Condition("b", (1,)),))]), "'b' must come before it"),
        (
            lambda: Parameters([Categorical("b", ("x",)), Float("a", 0, 1, conditions=(Condition("b", ("y",)),))]),
            "'b' is never one of",
        ),
        (lambda: Float("a", 1, 1), "is empty or not finite"),
        (lambda: Float("a", 0, float("inf")), "is empty or not finite"),
        (lambda: Integer("a", 2, 1), "is empty"),
        (lambda: Categorical("a", ()), "are empty or repeat"),
        (lambda: Categorical("a", ("x", "x")), "are empty or repeat"),
        (lambda: Float("a", 0, 1, default=2), "default 2 is not a number in"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(build: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()


def test_defaults() -> None:
    """Defaults are the middle of a range and the first choice unless stated."""
    assert Float("a", 0, 1).default_value == 0.5
    assert Integer("a", 1, 4).default_value == 2
    assert Categorical("a", ("x", "y")).default_value == "x"
    assert Float("a", 0, 1, default=0.0).default_value == 0.0


def test_json_names_type_range_and_conditions() -> None:
    assert PARAMETERS.to_json()[1] == {
        "type": "float",
        "name": "k",
        "low": 0.1,
        "high": 0.99,
        "default": None,
        "conditions": ({"parent": "method", "values": ("ties",)},),
    }
    assert json.loads(json.dumps(PARAMETERS.to_json()))[3]["type"] == "integer"
