from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.fidelity import Bracket, bracket_cycle, bracket_plan, fidelities, hyperband_brackets, rungs


@pytest.mark.parametrize(
    ("min_samples", "max_samples", "eta", "expected"),
    [
        (100, 1000, 3, (100, 300, 1000)),  # Table 3 of the LFS paper, MATH-LFS
        (100, 700, 3, (100, 300, 700)),  # the same, GEN-DIS-1
        (30, 270, 3, (30, 90, 270)),
        (1, 3, 2, (1, 2, 3)),
        (10, 1000, 10, (10, 100, 1000)),
    ],
)
def test_rungs_of_known_ladders(min_samples: int, max_samples: int, eta: int, expected: tuple[int, ...]) -> None:
    assert rungs(min_samples, max_samples, eta) == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (100, 170, 3),
            r"leaves one rung at eta=3; widen the range, or write `scheduler: none` \(with hyperband also `rungs",
        ),
        ((100, 100, 3), "min_samples=100 to max_samples=100 leaves one rung at eta=3"),
        ((300, 100, 3), "min_samples=300 is above max_samples=100"),
        ((30, 270, 1), "eta=1 is below 2"),
        ((0, 270, 3), "min_samples=0 is below 1"),
    ],
)
def test_budgets_that_give_no_ladder_are_refused(arguments: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rungs(*arguments)


@given(st.integers(1, 500), st.integers(1, 5000), st.integers(2, 10))
def test_rungs_increase_from_min_to_max(low: int, high: int, eta: int) -> None:
    try:
        ladder = rungs(low, high, eta)
    except ValueError:
        return
    assert (ladder[0], ladder[-1]) == (low, high)
    assert all(a < b for a, b in itertools.pairwise(ladder))


def test_fidelities_are_shares_of_the_full_budget() -> None:
    assert fidelities((30, 90, 270)) == pytest.approx((1 / 9, 1 / 3, 1.0))


def test_three_rungs_at_eta_three_are_the_brackets_smac_makes() -> None:
    assert [(bracket.first_rung, bracket.sizes) for bracket in hyperband_brackets(3, 3)] == [
        (0, (9, 3, 1)),
        (1, (5, 1)),
        (2, (3,)),
    ]


def test_samples_of_a_bracket() -> None:
    """A bracket's samples are those of its first rung for all trials, and the further ones of promoted trials."""
    assert [bracket.samples((4, 12, 36)) for bracket in hyperband_brackets(3, 3)] == [
        9 * 4 + 3 * 8 + 24,
        5 * 12 + 24,
        3 * 36,
    ]


def test_bracket_sizes_are_exact_where_floating_point_is_not() -> None:
    # 3^5 * 6 / 6 and 3^4 * 6 / 5: s_max + 1 = 6
    assert [bracket.num_configurations for bracket in hyperband_brackets(6, 3)] == [243, 98, 41, 18, 9, 6]


def test_one_rung_is_one_bracket_of_one_configuration() -> None:
    assert hyperband_brackets(1, 3) == (Bracket(1, first_rung=0, num_rungs=1, eta=3),)


def test_a_bracket_promotes_at_least_one() -> None:
    bracket = Bracket(2, first_rung=0, num_rungs=3, eta=3)
    assert bracket.sizes == (2, 1, 1)
    assert bracket.num_promoted(7) == 2


@pytest.mark.parametrize("arguments", [(0, 3), (3, 1)])
def test_brackets_need_a_rung_and_an_eta(arguments: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least one rung and eta 2"):
        hyperband_brackets(*arguments)


def test_plan_has_the_published_numbers_of_evaluations() -> None:
    """385 configurations take the 500 evaluations of GEN-LFS in Table 10 of the LFS paper, at each budget as many."""
    evaluations = Counter[int]()
    for bracket in bracket_plan(hyperband_brackets(3, 3), 385):
        evaluations.update(dict(enumerate(bracket.sizes, start=bracket.first_rung)))
    assert rungs(100, 1000, 3) == (100, 300, 1000)
    assert evaluations == {0: 207, 1: 181, 2: 112}


@given(st.integers(1, 5), st.integers(2, 4), st.integers(1, 300))
def test_plan_starts_max_trials(num_rungs: int, eta: int, max_trials: int) -> None:
    """A plan starts exactly `max_trials` trials and cuts only the last bracket."""
    cycle = hyperband_brackets(num_rungs, eta)
    plan = bracket_plan(cycle, max_trials)
    assert sum(bracket.num_configurations for bracket in plan) == max_trials
    assert all(a == b for a, b in zip(plan[:-1], itertools.cycle(cycle), strict=False))


def test_bracket_cycles() -> None:
    """Hyperband cycles through its brackets; other schedulers have one of all configurations."""
    sizes = {"eta": 3, "max_trials": 60}
    assert bracket_cycle("hyperband", num_rungs=3, **sizes) == hyperband_brackets(3, 3)
    assert bracket_cycle("asha", num_rungs=3, **sizes) == (Bracket(60, first_rung=0, num_rungs=3, eta=3),)
    for scheduler in ("none", "hyperband"):  # with one rung there is nothing that brackets could differ in
        assert bracket_cycle(scheduler, num_rungs=1, **sizes) == (Bracket(60, first_rung=0, num_rungs=1, eta=3),)
