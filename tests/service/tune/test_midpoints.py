"""The choice of two trials of a front for a new trial halfway between them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from search_spaces.parameters import Float, Parameters
from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.midpoints import midpoint

PARAMETERS = Parameters([Float("a", -0.5, 1.5), Float("b", 0.0, 1.0)])


def trial(number: int, a: float, costs: Sequence[float] | None, *, rung: int = 0, excess: float = 0.0) -> Observation:
    """A trial at the point (a, a / 2)."""
    known = None if costs is None else tuple(costs)
    return Observation({"a": a, "b": a / 2}, 1.0, known, number=number, rung=rung, constraints=(excess,))


# Halfway between the first two a front has more to gain than between the last two.
FRONT = [trial(0, 0.0, (0.1, 0.9)), trial(1, 0.4, (0.5, 0.3)), trial(2, 1.0, (0.6, 0.2))]


def place(observations: Sequence[Observation], pending: Sequence[dict[str, Any]] = ()) -> float | None:
    found = midpoint(ProposalContext(PARAMETERS, number=0, seed=0, observations=observations, pending=pending))
    if found is None:
        return None
    assert found["b"] == pytest.approx(found["a"] / 2)
    return round(float(found["a"]), 9)


def test_the_widest_gap_of_the_front_comes_first() -> None:
    assert place(FRONT) == 0.2
    assert place([*FRONT, trial(3, 0.9, (0.7, 0.95))]) == 0.2, "a dominated trial is no parent"


def test_no_midpoint_is_proposed_twice() -> None:
    assert place([*FRONT, trial(3, 0.2, (0.9, 0.9))]) == 0.5, "of the first and the last"
    assert place([*FRONT, trial(3, 0.2, None)]) == 0.5, "one that failed"
    assert place([*FRONT, trial(3, 0.2, (0.3, 0.6)), trial(4, 0.5, (0.9, 0.9))]) == 0.1, "of the front as it is now"


def test_pending_midpoint_counts_as_expected() -> None:
    """A midpoint that is being scored counts as if it had its expected value.

    What the middle of the first and the last could add is beside the pending one, and little.
    """
    front = [trial(0, 0.0, (0.1, 0.9)), trial(1, 0.4, (0.5, 0.5)), trial(2, 1.0, (0.9, 0.1))]
    assert place(front, [{"a": 0.2, "b": 0.1}]) == 0.7
    assert place(front, [{"a": 0.2, "b": 0.1}, {"a": 0.7, "b": 0.35}]) is None


def test_parents_are_feasible_and_complete() -> None:
    """Parents satisfy the constraints and have reached the highest rung."""
    assert place([trial(0, 0.0, (0.1, 0.9), excess=0.1), *FRONT[1:]]) == 0.7
    assert place([trial(0, 0.0, (0.1, 0.9)), *(trial(n, a, c, rung=1) for n, a, c in ((1, 0.4, (0.5, 0.3)),))]) is None


def test_where_nothing_is_to_be_gained_there_is_none() -> None:
    assert place([]) is None
    assert place(FRONT[:1]) is None
    assert place([trial(0, 0.0, (0.5, 0.5)), trial(1, 1.0, (0.5, 0.5))]) is None, "two that are alike"
    assert place([trial(0, 0.0, (1.2, 1.5)), trial(1, 1.0, (1.5, 1.2))]) is None, "worse than worthless"


def test_of_many_trials_the_least_crowded_are_paired(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ends of a front always are."""
    crowd = [trial(number, 0.01 * number, (0.1 + 0.01 * number, 0.9 - 0.01 * number)) for number in range(10)]
    front = [*crowd, trial(10, 1.0, (0.9, 0.1))]
    monkeypatch.setattr("service.tune.searchers.midpoints.MAX_PARENTS", 3)
    assert place(front) == pytest.approx((0.09 + 1.0) / 2)
    monkeypatch.setattr("service.tune.searchers.midpoints.MAX_PARENTS", 2)
    assert place(front) == 0.5
