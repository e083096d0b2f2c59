"""Samples of two trials side by side."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.objectives import Objective
from service.results.side_by_side import side_by_side
from service.results.statistics import paired_difference

ACCURACY = Objective("math", "acc", "maximize")
LOSS = Objective("loss", "loss", "minimize", (0.0, 4.0))
NAN = np.nan


def test_samples_are_counted_by_who_is_right() -> None:
    """Counts, difference and listed positions are of samples that both trials have."""
    a = np.array([1.0, 1, 0, 0, NAN, 1, 1])
    b = np.array([1.0, 0, 1, 0, 1, NAN])
    positions, found = side_by_side(ACCURACY, a, b)
    assert positions == [0, 1, 2, 3]
    assert found is not None
    assert (found.num_samples, found.both_right, found.a_only, found.b_only, found.both_wrong) == (4, 1, 1, 1, 1)
    assert found.difference == paired_difference([1, 1, 0, 0], [1, 0, 1, 0])
    kept = {only: side_by_side(ACCURACY, a, b, only=only)[0] for only in ("differs", "a_only", "b_only", "both_wrong")}
    assert kept == {"differs": [1, 2], "a_only": [1], "b_only": [2], "both_wrong": [3]}


def test_the_best_value_of_a_loss_is_the_lowest() -> None:
    positions, found = side_by_side(LOSS, np.array([0.0, 2, 4]), np.array([1.0, 0, 4]), only="a_only")
    assert positions == [0]
    assert found is not None
    assert found.difference is not None
    assert found.difference.value == pytest.approx(1 / 3)
    assert (found.a_only, found.b_only, found.both_wrong) == (1, 1, 1)


def test_values_outside_the_range_are_compared() -> None:
    """Values may lie outside the stated range; their interval is then not cut."""
    a, b = np.array([5.0, 2]), np.array([1.0, 2])
    assert side_by_side(LOSS, a, b)[1].difference == paired_difference(a, b)  # type: ignore[union-attr]


def test_one_trial_or_no_samples_have_no_difference() -> None:
    assert side_by_side(ACCURACY, np.array([NAN, 1.0]), None) == ([1], None)
    positions, found = side_by_side(ACCURACY, np.array([1.0]), np.array([]))
    assert positions == []
    assert found is not None
    assert (found.num_samples, found.difference) == (0, None)
