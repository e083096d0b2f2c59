from __future__ import annotations

import pickle

import pytest

from search_spaces.errors import (
    InvalidConfiguration,
    InvalidPreference,
    InvalidRecipe,
    InvalidStudy,
    Problem,
    SearchSpaceError,
)

ERRORS = [
    SearchSpaceError("why"),
    InvalidConfiguration("why"),
    InvalidRecipe("why"),
    InvalidPreference("why"),
    InvalidStudy((Problem("a.b", "wrong"), Problem("", "worse"))),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_cross_process_boundaries(error: Exception) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, str(again)) == (type(error), error.args, str(error))


def test_an_invalid_study_says_every_problem_and_where_it_is() -> None:
    assert str(ERRORS[-1]) == "a.b: wrong\nworse"
