"""The share of candidates that the bound stops wrongly, and the time until it stops a worse one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from search_spaces.fidelity import Bracket
from service.tune.schedulers.bound import Bound, largest_capital
from service.tune.schedulers.racing import RacingTable
from tests.service.tune.schedulers.test_rung_table import propose

POPULATION = 120
LOOKS = (30, 60, POPULATION)
ERROR_RATE = 0.2


def population(better: int, worse: int, *, size: int = POPULATION) -> NDArray[np.float64]:
    """Differences of answers per sample: 1.0 on `worse` samples where only the candidate is wrong, -1.0 on `better`."""
    return np.array([1.0] * worse + [-1.0] * better + [0.0] * (size - better - worse))


def test_bets_without_difference_seldom_win() -> None:
    """Bets on a difference of zero seldom win, whatever the number of looks."""
    rng = np.random.default_rng(0)
    for better, worse in ((30, 30), (5, 5), (60, 60), (40, 30)):
        differences = population(better, worse)
        largest = [largest_capital(rng.permutation(differences), population=POPULATION) for _ in range(1500)]
        for alpha in (0.2, 0.05):
            # Three standard errors of a share of 1,500.
            assert np.mean(np.array(largest) >= 1 / alpha) <= alpha + 3 * math.sqrt(alpha * (1 - alpha) / 1500)


def test_certain_sum() -> None:
    """A sum that stays positive whatever follows is certain; one that may be zero is not."""
    assert largest_capital(np.array([1.0] * 31), population=60) == math.inf
    assert 1e6 < largest_capital(np.array([1.0] * 30), population=60) < math.inf
    assert largest_capital(np.array([1.0] * 30 + [-1.0] * 30), population=60) < math.inf
    assert largest_capital(np.array([-1.0] * 60), population=60) == 1.0


def test_the_capital_is_that_of_the_bets_by_hand() -> None:
    # One sample of four, a difference of 1/2: nothing is expected of it; a bet of c has 1 + c/2.
    assert largest_capital(np.array([0.5]), population=4) == pytest.approx(1.25)
    # Then -1/6 is expected of the next: a bet of c has the factor 1 + c (1/2 + 1/6) / (1 - 1/6).
    bets = (np.arange(20) + 0.5) / 20
    expected = np.mean((1 + bets / 2) * (1 + bets * 0.8))
    assert largest_capital(np.array([0.5, 0.5]), population=4) == pytest.approx(expected)
    # The largest so far counts.
    assert largest_capital(np.array([0.5, -1.0]), population=4) == pytest.approx(1.25)
    assert largest_capital(np.array([]), population=4) == 1.0


def race(costs: NDArray[np.float64], *, error_rate: float | None) -> dict[int, tuple[int, str]]:
    """For each stopped trial, by number: its rung and the reason.

    `costs` [trials, samples] are those of one baseline, then of the proposed trials. Without an error rate, every trial
    that is behind is stopped.
    """

    def differences(number: int, rival: int, rung: int) -> list[NDArray[np.float64]]:
        return [(costs[number] - costs[rival])[: LOOKS[rung]]]

    table = RacingTable(
        num_rungs=len(LOOKS),
        eta=3,
        cycle=(Bracket(1, 0, len(LOOKS), 3),),
        num_baselines=1,
        max_trials=len(costs) - 1,
        max_staleness=1,
        bound=None if error_rate is None else Bound(differences, (POPULATION,), error_rate),
    )
    means = [[(float(each[:size].mean()),) for size in LOOKS] for each in costs]
    table.add_trial(0, None)
    table.know(0, dict(enumerate(means[0][:-1])))
    table.record(0, len(LOOKS) - 1, means[0][-1])
    stopped: dict[int, tuple[int, str]] = {}
    while (number := propose(table)) is not None:
        for rung, cost in enumerate(means[number]):
            for decision in table.record(number, rung, cost) if number not in stopped else ():
                if decision.pruned:
                    stopped[number] = (decision.rung, decision.reason)
    return stopped


def wrong_studies(num_studies: int, *, error_rate: float | None) -> float:
    """Share of studies in which a trial is stopped, although all six trials are as good as the baseline."""
    rng = np.random.default_rng(1)
    answers = (np.arange(POPULATION) % 2).astype(float)
    studies = (np.stack([rng.permutation(answers) for _ in range(7)]) for _ in range(num_studies))
    return float(np.mean([bool(race(costs, error_rate=error_rate)) for costs in studies]))


def test_wrong_stops_keep_the_error_rate() -> None:
    """The share of studies that stop a candidate wrongly is within the error rate."""
    num_studies = 300
    limit = ERROR_RATE + 3 * math.sqrt(ERROR_RATE * (1 - ERROR_RATE) / num_studies)
    assert wrong_studies(num_studies, error_rate=ERROR_RATE) <= limit
    assert wrong_studies(50, error_rate=None) > 0.9, "every trial that is behind is stopped"


def test_clear_loser_is_stopped() -> None:
    """A clear loser is stopped at the first look, and the decision says by which rival."""
    rng = np.random.default_rng(2)
    shares = (0.5, 0.95, 0.3)
    costs = np.stack([rng.permutation(np.arange(POPULATION) < share * POPULATION).astype(float) for share in shares])
    reason = "behind at rung 0, by the bound for an error rate of 0.05"
    assert race(costs, error_rate=0.05) == {1: (0, reason)}


def test_later_candidates_and_more_rivals_need_more_certainty() -> None:
    differences = np.array([1.0] * 8 + [0.0] * 22)
    capital = largest_capital(differences, population=POPULATION)
    bound = Bound(lambda *_: [differences], (POPULATION,), 2 / capital)

    def is_behind(**shares: Any) -> bool:
        return bound.is_behind(1, 0, 0, **shares)

    assert is_behind(candidate=1, num_rivals=1)
    assert not is_behind(candidate=2, num_rivals=1)
    assert not is_behind(candidate=1, num_rivals=2)


def test_loser_is_behind_in_all_objectives() -> None:
    """With several objectives, a stopped candidate is behind in all of them."""
    behind, level = np.array([1.0] * 30), np.array([0.0] * 30)
    for second, expected in ((behind, True), (level, False)):
        bound = Bound(lambda *_, second=second: [behind, second], (POPULATION, POPULATION), 0.05)
        assert bound.is_behind(1, 0, 0, candidate=1, num_rivals=1) is expected
