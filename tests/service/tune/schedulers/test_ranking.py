"""The order of promotion is updated incrementally, with the same result as sorting all candidates."""

from __future__ import annotations

import random

import pytest

from search_spaces.objectives import Candidate, promotion_order
from service.tune.schedulers.ranking import Ranking
from tests.service.tune.schedulers.test_rung_table import asha_of, table_of


@pytest.mark.parametrize("share_infeasible", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("num_levels", [2, 7, 10_000])
@pytest.mark.parametrize("num_objectives", [1, 2, 3])
def test_kept_order_is_the_sorted_one(num_objectives: int, num_levels: int, share_infeasible: float) -> None:
    """What is taken after each candidate is what the order of all candidates so far promotes."""
    draw = random.Random(f"{num_objectives} {num_levels} {share_infeasible}")
    ranking, candidates = Ranking(), list[Candidate]()
    promoted: set[int] = set()
    for number in draw.sample(range(1000), 120):
        skill = draw.random()
        costs = tuple(round((skill + draw.random()) * num_levels) / num_levels for _ in range(num_objectives))
        violation = round(draw.random(), 1) if draw.random() < share_infeasible else 0.0
        candidates.append(Candidate(number, costs, violation))
        ranking.add(candidates[-1])
        count = len(candidates) // 3
        expected = [number for number in promotion_order(candidates)[:count] if number not in promoted]
        assert ranking.take(count) == expected
        assert ranking.best(count) == list(promotion_order(candidates))[:count]
        promoted.update(expected)
    assert ranking.take(10 * len(candidates)) == [n for n in promotion_order(candidates) if n not in promoted]


def test_nothing_is_taken_of_an_empty_order() -> None:
    assert Ranking().take(3) == []


def test_no_candidate_is_looked_at_again() -> None:
    """A decision asks for the violation of the new member only, however many members the rung has."""
    asked: list[tuple[int, int]] = []

    def violation(number: int, rung: int) -> float:
        asked.append((number, rung))
        return 0.0

    table = asha_of(60, violation=violation)
    for number in range(60):
        table.record(number, 0, (number * 37 % 61 / 61, number * 17 % 61 / 61))
    assert asked == [(number, 0) for number in range(60)]


def test_race_asks_for_its_front_only() -> None:
    """A decision of a race asks for the trial, its rivals and what ended since, not for all trials before."""
    asked: list[tuple[int, int]] = []

    def violation(number: int, rung: int) -> float:
        asked.append((number, rung))
        return 0.0

    table = table_of(max_trials=50, scheduler="racing", violation=violation)
    for number in range(50):
        proposal = table.proposal()
        assert proposal is not None
        table.open_bracket(number, first_rung=0, size=1)
        table.add_trial(number, number)
        for rung in range(3):
            table.record(number, rung, (1 - number / 100,))
    # Each trial is better than the one before, which is its only rival: itself and the rival at two rungs, and each new
    # member of the front once.
    assert len(asked) <= 5 * 50
