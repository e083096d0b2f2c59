"""Races: the trials that continue, their rivals, and the same end after a resumption."""

from __future__ import annotations

from typing import Any

import pytest

from service.tune.schedulers.racing import RacingTable
from tests.service.tune.schedulers.test_rung_table import propose, table_of

LOOKS = 3


def race(*, baselines: int = 2, max_staleness: int = 1, max_trials: int = 10, **options: Any) -> RacingTable:
    table = table_of(
        max_trials=max_trials,
        scheduler="racing",
        baselines=baselines,
        max_staleness=max_staleness,
        num_rungs=LOOKS,
        **options,
    )
    assert isinstance(table, RacingTable)
    return table


def scored_in_full(table: RacingTable, number: int, *costs: float) -> None:
    """Add a baseline with these costs at the looks."""
    table.know(number, {rung: (cost,) for rung, cost in enumerate(costs[:-1])})
    table.record(number, LOOKS - 1, (costs[-1],))


def test_rival_ahead_stops_a_trial() -> None:
    """A trial is stopped at the first look at which a rival is ahead on the same samples."""
    table = race()
    scored_in_full(table, 0, 0.9, 0.1, 0.3)
    scored_in_full(table, 1, 0.1, 0.9, 0.5)  # ahead at the first look, but no rival: trial 0 is better in full
    assert propose(table) == 2
    (going_on,) = table.record(2, 0, (0.9,))
    assert (going_on.promoted, going_on.pruned) == ((2,), ())
    assert list(table.ready()) == [(2, 1)]
    (stopped,) = table.record(2, 1, (0.2,))
    assert (stopped.rung, stopped.promoted, stopped.pruned, stopped.rival) == (1, (), (2,), 0)
    assert going_on.rival is None
    assert list(table.ready()) == []


def test_a_tie_goes_on_and_the_best_trial_is_the_next_rival() -> None:
    table = race(baselines=1)
    scored_in_full(table, 0, 0.5, 0.5, 0.5)
    assert propose(table) == 1
    for rung, cost in enumerate((0.5, 0.5, 0.2)):
        table.record(1, rung, (cost,))
    assert propose(table) == 2
    table.record(2, 0, (0.4,))  # ahead of trial 0 and of trial 1 at this look
    (stopped,) = table.record(2, 1, (0.51,))
    assert stopped.pruned == (2,)


def test_dominating_rival_stops_a_trial() -> None:
    """All rivals on the front count, and only one that dominates stops a trial."""
    table = race()
    for number, costs in enumerate([(0.1, 0.8), (0.8, 0.1)]):
        table.know(number, {0: costs, 1: costs})
        table.record(number, LOOKS - 1, costs)
    for number, costs, goes_on in [(2, (0.7, 0.7), True), (3, (0.2, 0.9), False), (4, (0.9, 0.2), False)]:
        assert propose(table) == number
        (decision,) = table.record(number, 0, costs)
        assert decision.promoted == ((number,) if goes_on else ())
        assert decision.rival == {2: None, 3: 0, 4: 1}[number]
        if goes_on:
            table.record(number, 1, (0.9, 0.9))


def test_rivals_are_known_trials() -> None:
    """Rivals are trials that the proposal may know; a failed trial is none."""
    table = race(baselines=3, max_staleness=2)
    scored_in_full(table, 0, 0.5, 0.5, 0.5)
    table.fail(1)
    assert propose(table) == 3
    scored_in_full(table, 2, 0.1, 0.1, 0.1)
    (decision,) = table.record(3, 0, (0.4,))
    assert decision.promoted == (3,), "trial 2 is newer than what trial 3 may know"
    table.fail(3)
    assert propose(table) == 4
    (decision,) = table.record(4, 0, (0.4,))
    assert decision.pruned == (4,)


@pytest.mark.parametrize("max_staleness", [1, 3])
def test_resumed_order_gives_same_decisions(max_staleness: int) -> None:
    """Results in the order of a resumed search give the same decisions."""
    costs = [[(i < 2) + (i * 37 % 11 + rung * (i % 3)) / 20 for rung in range(LOOKS)] for i in range(12)]

    def live() -> tuple[RacingTable, dict[int, int]]:
        table, reached = race(baselines=2, max_staleness=max_staleness), {}
        for number in range(2):
            scored_in_full(table, number, *costs[number])
        while not table.is_finished:
            while propose(table) is not None:
                pass
            number, rung = next(table.ready())
            table.record(number, rung, (costs[number][rung],))
            reached[number] = rung
        return table, reached

    _, reached = live()
    assert 0 < sum(rung < LOOKS - 1 for rung in reached.values()) < len(reached)

    again = race(baselines=2, max_staleness=max_staleness)
    for number in range(2, 12):
        again.open_bracket(number - 2, first_rung=0, size=1)
        again.add_trial(number, number - 2)
    for number in range(2):
        again.know(number, {rung: (cost,) for rung, cost in enumerate(costs[number][:-1])})
    for rung in range(LOOKS):  # as the coordinator replays: rung after rung
        for number in range(12):
            if rung <= reached.get(number, -1) or (number < 2 and rung == LOOKS - 1):
                again.record(number, rung, (costs[number][rung],))
    assert again.is_finished
    assert list(again.ready()) == []


def test_with_constraints_the_smaller_violation_is_ahead() -> None:
    violation = {(0, 2): 0.0, (0, 0): 0.0, (1, 2): 0.4, (1, 0): 0.4, (2, 0): 0.1, (3, 0): 0.0}
    table = race(violation=lambda number, rung: violation[number, rung])
    scored_in_full(table, 0, 0.5, 0.5, 0.5)
    scored_in_full(table, 1, 0.1, 0.1, 0.1)  # the best values, and no rival: it violates a constraint
    assert propose(table) == 2
    (stopped,) = table.record(2, 0, (0.2,))
    assert stopped.pruned == (2,)
    assert propose(table) == 3
    (going_on,) = table.record(3, 0, (0.45,))
    assert going_on.promoted == (3,)
