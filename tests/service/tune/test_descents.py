"""Which descents a search makes for its preference vectors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from search_spaces.preferences import lattice
from search_spaces.study.sections import MAX_PREFERENCES, GradientOptions
from service.tune.searchers.base import SearchSetting
from service.tune.searchers.descents import Descent, descents_of, place_of

OPTIONS = GradientOptions(steps=12, points=4)


def over_lattice(num_objectives: int, divisions: int, options: GradientOptions = OPTIONS) -> tuple[Descent, ...]:
    vectors = tuple(map(tuple, lattice(num_objectives, divisions=divisions).tolist()))
    return descents_of(options, vectors)


def test_without_preference_vectors_there_is_one_descent_at_equal_weights() -> None:
    assert descents_of(OPTIONS, SearchSetting(objectives=("a", "b", "c", "d")).vectors) == (
        Descent((0.25,) * 4, (), 12, 4, 0.2),
    )


def test_the_first_is_nearest_to_equal_weights_and_each_other_follows_a_neighbour() -> None:
    descents = over_lattice(3, 3)
    assert descents[0].preference == pytest.approx((1 / 3, 1 / 3, 1 / 3))
    assert len({descent.preference for descent in descents}) == 10
    for number, descent in enumerate(descents[1:], start=1):
        before = np.array([other.preference for other in descents[:number]])
        apart = np.linalg.norm(before - descent.preference, axis=1)
        assert sorted(descent.neighbours) == list(range(number))
        assert (np.diff(apart[list(descent.neighbours)]) > -1e-9).all()
        assert apart.min() == pytest.approx(np.sqrt(2) / 3), "a lattice never has to jump"


def test_equally_near_vectors_come_in_the_order_in_which_they_are_given() -> None:
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
def test_every_descent_has_a_point_and_together_they_have_as_many_as_the_study_says(
    points: int, warm_steps: int | None, expected: list[int]
) -> None:
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


def test_as_many_descents_as_a_study_may_have_are_ordered_in_a_moment() -> None:
    assert len(over_lattice(2, MAX_PREFERENCES - 1)) == MAX_PREFERENCES
