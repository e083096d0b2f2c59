from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search_spaces.errors import InvalidStudy
from search_spaces.objectives import (
    Candidate,
    Objective,
    constrained_dominates,
    constrained_front,
    crowding_distances,
    dominates,
    hypervolume,
    non_dominated,
    non_dominated_ranks,
    promotion_order,
)

costs_2d = st.lists(st.tuples(*[st.integers(0, 10).map(lambda i: i / 10)] * 2), min_size=1, max_size=8)
costs_4d = st.lists(st.tuples(*[st.integers(0, 4).map(lambda i: i / 4)] * 4), min_size=1, max_size=6)


def test_cost_of_a_share_is_what_is_missing_to_one() -> None:
    assert Objective("math", "exact_match", "maximize").cost(0.25) == 0.75


def test_cost_of_a_ranged_metric() -> None:
    """The cost of a ranged metric is its relative distance from the better end."""
    assert Objective("fluency", "word_perplexity", "minimize", (1, 101)).cost(26) == 0.25
    assert Objective("translation", "bleu", "maximize", (0, 100)).cost(30) == pytest.approx(0.7)


def test_cost_beyond_the_range_keeps_the_order() -> None:
    objective = Objective("fluency", "word_perplexity", "minimize", (1, 101))
    assert objective.cost(300) > objective.cost(200) > 1


@pytest.mark.parametrize(("metric", "direction"), [("word_perplexity", "minimize"), ("bleu", "maximize")])
def test_unbounded_objective_needs_a_range(metric: str, direction: Literal["maximize", "minimize"]) -> None:
    """An objective known to leave the unit interval needs a range."""
    with pytest.raises(InvalidStudy, match=f"{metric} .* state where its values lie, e.g. range"):
        Objective("x", metric, direction)


def test_an_empty_range_is_refused() -> None:
    with pytest.raises(InvalidStudy, match=r"objective 'x': range \[2, 1\] is empty"):
        Objective("x", "bleu", "maximize", (2, 1))


def test_a_value_outside_the_unit_interval_asks_for_a_range() -> None:
    with pytest.raises(InvalidStudy, match=r"objective 'x': score=7 is outside \[0, 1\]; state where"):
        Objective("x", "score", "maximize").cost(7)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_no_number_has_no_cost(value: float) -> None:
    with pytest.raises(ValueError, match="is not a finite number"):
        Objective("x", "score", "maximize", (0, 10)).cost(value)


def test_better_follows_the_direction() -> None:
    assert Objective("x", "acc", "maximize").is_better(0.6, 0.5)
    assert Objective("x", "ppl", "minimize", (1, 9)).is_better(2, 3)


def test_dominance_needs_one_strictly_smaller_cost() -> None:
    assert dominates((0.1, 0.2), (0.1, 0.3))
    assert not dominates((0.1, 0.2), (0.1, 0.2))
    assert not dominates((0.1, 0.4), (0.2, 0.3))


def test_ranks_of_two_nested_fronts() -> None:
    assert non_dominated_ranks([(0.1, 0.9), (0.9, 0.1), (0.5, 0.5), (0.6, 0.6), (1.0, 1.0)]) == (0, 0, 0, 1, 2)


@given(costs_2d)
def test_a_point_is_dominated_by_some_point_of_the_rank_before(costs: list[tuple[float, ...]]) -> None:
    ranks = non_dominated_ranks(costs)
    for point, rank in zip(costs, ranks, strict=True):
        better = [r for other, r in zip(costs, ranks, strict=True) if dominates(other, point)]
        assert rank == (max(better) + 1 if better else 0)


@given(costs_4d)
def test_front_is_not_dominated(costs: list[tuple[float, ...]]) -> None:
    """The front holds the points that no other point dominates, equal points included."""
    assert non_dominated(costs) == tuple(not any(dominates(other, point) for other in costs) for point in costs)
    assert non_dominated(costs) == tuple(rank == 0 for rank in non_dominated_ranks(costs))


def test_no_points_have_no_ranks_and_no_front() -> None:
    assert non_dominated_ranks([]) == ()
    assert non_dominated([]) == ()


@given(st.lists(st.tuples(st.floats(-1, 2)), min_size=1, max_size=8))
def test_one_objective_ranks_by_its_distinct_costs(costs: list[tuple[float, ...]]) -> None:
    distinct = sorted(set(costs))
    assert non_dominated_ranks(costs) == tuple(distinct.index(cost) for cost in costs)
    assert non_dominated(costs) == tuple(cost == distinct[0] for cost in costs)
    assert hypervolume(costs) == pytest.approx(max(0.0, 1.1 - distinct[0][0]))


def test_crowding_distance() -> None:
    """Crowding distance is the sum of normalised gaps, and infinite at the ends."""
    # second point: (0.5 - 0) / 1 + (1 - 0.4) / 1; third: (1 - 0.25) / 1 + (0.6 - 0) / 1
    distances = crowding_distances([(0.0, 1.0), (0.25, 0.6), (0.5, 0.4), (1.0, 0.0)])
    assert distances == pytest.approx((math.inf, 1.1, 1.35, math.inf))


def test_equal_points_are_not_alone_and_nothing_has_no_crowding() -> None:
    assert crowding_distances([(0.5, 0.5), (0.5, 0.5)]) == (0.0, 0.0)
    assert crowding_distances([]) == ()


def test_promotion_order_of_one_objective() -> None:
    """One objective promotes by cost, then by number, failures last."""
    candidates = [
        Candidate(1, None),
        Candidate(4, (0.2,)),
        Candidate(3, (0.2,)),
        Candidate(2, (0.5,)),
        Candidate(5, (0.1,)),
    ]
    assert promotion_order(candidates) == (5, 3, 4, 2, 1)


def test_promotion_order_of_objectives() -> None:
    """Several objectives promote by rank, then by crowding distance, then by number."""
    candidates = [
        Candidate(1, (0.9, 0.9)),
        Candidate(2, (0.5, 0.5)),
        Candidate(3, (0.45, 0.55)),
        Candidate(4, (0.0, 1.0)),
        Candidate(5, (1.0, 0.0)),
        Candidate(6, None),
        Candidate(0, None),
    ]
    # 4 and 5 are ends; 2 has the wider gap: (1 - 0.45) + (0.55 - 0) against (0.5 - 0) + (1 - 0.5)
    assert promotion_order(candidates) == (4, 5, 2, 3, 1, 0, 6)


def test_promotion_does_not_depend_on_the_order_given() -> None:
    candidates = [Candidate(i, (i % 3 / 3, i % 5 / 5)) for i in range(15)]
    assert promotion_order(candidates) == promotion_order(candidates[::-1])


@pytest.mark.parametrize(
    ("front", "reference", "volume"),
    [
        ([], 1.0, 0.0),
        ([(0.0,)], 1.1, 1.1),
        ([(0.25, 0.5)], 1.0, 0.375),
        ([(0.0, 0.5), (0.5, 0.0)], 1.0, 0.75),
        ([(0.0, 0.5), (0.5, 0.0), (0.5, 0.5), (0.0, 0.5)], 1.0, 0.75),  # a dominated and a repeated point
        ([(0.5, 0.5), (0.1, 1.2)], 1.0, 0.25),  # a point beyond the reference
        ([(0.0, 0.5, 0.5), (0.5, 0.0, 0.5), (0.5, 0.5, 0.0)], 1.0, 0.5),  # 3 x 1/4, three overlaps of 1/8 less 1/8
    ],
)
def test_hypervolume_of_known_fronts(front: list[tuple[float, ...]], reference: float, volume: float) -> None:
    assert hypervolume(front, reference) == pytest.approx(volume)


@given(costs_2d)
def test_hypervolume_of_two_objectives(costs: list[tuple[float, ...]]) -> None:
    """The hypervolume of two objectives is the area under the staircase."""
    area, ceiling = 0.0, 1.1
    for first, second in sorted(costs):
        if second < ceiling:
            area += (1.1 - first) * (ceiling - second)
            ceiling = second
    assert hypervolume(costs) == pytest.approx(area)


@given(costs_4d)
def test_hypervolume_of_four_objectives(costs: list[tuple[float, ...]]) -> None:
    """The hypervolume of four objectives is that of the covered grid cells."""
    edges = [i / 4 for i in range(5)] + [1.1]
    cells = [(low, high - low) for low, high in itertools.pairwise(edges)]
    covered = 0.0
    for index in range(len(cells) ** 4):
        cell = [cells[index // len(cells) ** axis % len(cells)] for axis in range(4)]
        if any(all(cost <= low for cost, (low, _) in zip(point, cell, strict=True)) for point in costs):
            covered += math.prod(width for _, width in cell)
    assert hypervolume(costs) == pytest.approx(covered)


# Constraints.


def test_feasible_trials_are_promoted_first() -> None:
    """Feasible trials are promoted first, then those with the least violation."""
    candidates = [
        Candidate(1, (0.1,), violation=0.3),
        Candidate(2, (0.9,)),
        Candidate(3, None),
        Candidate(4, (0.5,), violation=0.1),
        Candidate(5, (0.4,)),
        Candidate(6, (0.2,), violation=0.3),
    ]
    assert promotion_order(candidates) == (5, 2, 4, 1, 6, 3)


def test_front_with_constraints() -> None:
    """A front with constraints holds only the points with the least violation."""
    good, better, cheap = Candidate(1, (0.5, 0.5)), Candidate(2, (0.4, 0.4)), Candidate(3, (0.1, 0.1), violation=0.2)
    assert constrained_front([good, cheap, better]) == (False, False, True)
    worse = Candidate(4, (0.0, 0.0), violation=0.5)
    assert constrained_front([worse, cheap]) == (False, True)
    assert constrained_front([]) == ()


def test_domination_looks_at_violations_before_costs() -> None:
    kept, cheap = Candidate(1, (0.5,)), Candidate(2, (0.1,), violation=0.2)
    failed = Candidate(3, None)
    assert constrained_dominates(kept, cheap)
    assert not constrained_dominates(cheap, kept)
    assert constrained_dominates(cheap, replace(cheap, violation=0.3))
    assert constrained_dominates(replace(cheap, costs=(0.05,)), cheap)
    assert constrained_dominates(cheap, failed)
    assert not constrained_dominates(failed, cheap)
    assert not constrained_dominates(failed, failed)
