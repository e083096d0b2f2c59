"""The descents of a search for its preference vectors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from search_spaces.preferences import lattice
from search_spaces.study.search import MAX_PREFERENCES, GradientOptions
from service.tune.searchers.base import SearchSetting
from service.tune.searchers.descents import Descent, descents_of, fitting_points, num_steps_for, place_of

OPTIONS = GradientOptions(steps=12, points=4)


def over_lattice(num_objectives: int, divisions: int, options: GradientOptions = OPTIONS) -> tuple[Descent, ...]:
    vectors = tuple(map(tuple, lattice(num_objectives, divisions=divisions).tolist()))
    return descents_of(options, vectors)


def test_one_descent_without_preferences() -> None:
    """Without preference vectors, there is one descent at equal weights."""
    assert descents_of(OPTIONS, SearchSetting(objectives=("a", "b", "c", "d")).vectors) == (
        Descent((0.25,) * 4, (), 12, 4, 0.2),
    )


def test_number_of_steps_for_proposals() -> None:
    """Two descents, of 12 steps with 2 points and of 3 steps with 1 point; later proposals need no gradients."""
    descents = descents_of(GradientOptions(steps=12, points=3), ((1.0, 0.0), (0.0, 1.0)))
    assert [(each.num_steps, each.num_points) for each in descents] == [(12, 2), (3, 1)]
    assert [num_steps_for(number, descents) for number in (0, 1, 2, 3, 9)] == [0, 6, 12, 15, 15]


@pytest.mark.parametrize(
    ("points", "warm_steps", "num_vectors", "max_trials", "expected"),
    [
        (4, None, 1, 100, 4),
        (4, None, 1, 2, 2),
        (20, None, 1, 100, 12),  # a descent of twelve steps has twelve different points
        (20, 2, 3, 100, 16),
        (1, None, 3, 100, 1),  # every descent has a point all the same
        (4, None, 3, 2, 3),
    ],
)
def test_points_fit_steps_and_trials(
    points: int, warm_steps: int | None, num_vectors: int, max_trials: int, expected: int
) -> None:
    options = GradientOptions(steps=12, points=points, warm_steps=warm_steps)
    found = fitting_points(options, num_vectors=num_vectors, max_trials=max_trials)
    assert found == expected
    vectors = tuple((number / 4, 1 - number / 4) for number in range(num_vectors))
    for descent in descents_of(options.model_copy(update={"points": found}), vectors):
        assert descent.num_points <= descent.num_steps


def test_descents_follow_neighbours() -> None:
    """The first descent is nearest to equal weights, and each other one follows a neighbour."""
    descents = over_lattice(3, 3)
    assert descents[0].preference == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert len({descent.preference for descent in descents}) == 10
    for number, descent in enumerate(descents[1:], start=1):
        before = np.array([other.preference for other in descents[:number]])
        apart = np.linalg.norm(before - descent.preference, axis=1)
        assert sorted(descent.neighbours) == list(range(number))
        assert (np.diff(apart[list(descent.neighbours)]) > -1e-9).all()
        assert apart.min() == pytest.approx(np.sqrt(2) / 3), "a lattice never has to jump"


def test_equally_near_vectors_keep_order() -> None:
    """Equally near vectors keep the order in which they are given."""
    vectors = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.5))
    found = descents_of(OPTIONS, vectors)
    assert [descent.preference for descent in found] == [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0)]
    assert [descent.neighbours for descent in found] == [(), (0,), (0, 1)]


@pytest.mark.parametrize(
    ("points", "warm_steps", "expected"),
    [
        (1, None, [1, 1, 1]),
        (3, None, [1, 1, 1]),
        (4, None, [2, 1, 1]),
        (9, None, [3, 3, 3]),
        (12, 2, [8, 2, 2]),  # a descent of two steps has two points
    ],
)
def test_points_are_shared_by_descents(points: int, warm_steps: int | None, expected: list[int]) -> None:
    """Every descent has a point, and together they have the study's number of points."""
    options = GradientOptions(steps=12, points=points, warm_steps=warm_steps)
    descents = over_lattice(2, 2, options)
    assert [descent.num_points for descent in descents] == expected
    assert [descent.num_steps for descent in descents] == [12, *[warm_steps or 3] * 2]
    assert [descent.learning_rate for descent in descents] == pytest.approx([0.2, 0.12, 0.12])
    for descent in descents:
        reached = [descent.num_steps_to(point) for point in range(descent.num_points)]
        assert reached[-1] == descent.num_steps
        assert all(0 < a < b for a, b in pairwise(reached))
    places = [place_of(index, descents) for index in range(sum(expected))]
    assert places == [(number, point) for number, count in enumerate(expected) for point in range(count)]
    assert place_of(sum(expected), descents) is None


def test_many_descents_are_ordered_fast() -> None:
    """The largest accepted number of descents is ordered quickly."""
    assert len(over_lattice(2, MAX_PREFERENCES - 1)) == MAX_PREFERENCES
