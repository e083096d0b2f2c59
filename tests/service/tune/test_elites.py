"""Elites of HM3: the archive of a preference vector, and mutants that were not proposed before."""

from __future__ import annotations

import numpy as np
import pytest

from search_spaces.spaces.layer_paths import LayerPaths
from service.tune.searchers.elites import KnownPaths, archive, last_improvement, outcomes_of, unseen_near

PATHS = LayerPaths(("a", "b"), 3, 2, 4, 1)
VALUES = np.array([[0.9, 0.1], [0.4, 0.4], [0.1, 0.8]])


@pytest.mark.parametrize(
    ("scalarisation", "preference", "best"),
    [
        ("weighted_sum", (0.5, 0.5), 0),
        ("weighted_sum", (0.4, 0.6), 2),
        ("tchebycheff", (0.5, 0.5), 1),  # gaps of 0.7, 0.5 and 0.8: no weighted sum is largest at this path
        ("tchebycheff", (0.9, 0.1), 0),
        ("tchebycheff", (0.0, 1.0), 2),
    ],
)
def test_each_vector_has_best_paths_of_its_own(scalarisation: str, preference: tuple[float, ...], best: int) -> None:
    outcomes = outcomes_of(VALUES, preference, scalarisation)
    assert int(outcomes.argmax()) == best
    known = [{"path": number} for number in range(3)]
    assert archive(known, outcomes, size=1) == [{"path": best}]


def test_the_weighted_distance_is_the_largest() -> None:
    found = outcomes_of(VALUES, (0.25, 0.75), "tchebycheff")
    np.testing.assert_allclose(found, [-0.75 * 0.7, -0.75 * 0.4, -0.25 * 0.8])


def test_an_archive_has_each_path_once_and_the_best_first() -> None:
    known = [{"path": path} for path in "abcab"]
    assert archive(known, np.array([0.1, 0.5, 0.3, 0.9, 0.5]), size=3) == [{"path": path} for path in "abc"]
    assert archive(known, np.array([0.1, 0.5, 0.3, 0.9, 0.5]), size=2) == [{"path": path} for path in "ab"]


def test_mutants_were_not_proposed_before() -> None:
    rng = np.random.default_rng(0)
    known = [PATHS.configuration((0, 1, 2))]
    for _ in range(40):
        found = unseen_near(PATHS, PATHS.configuration((0, 1, 2)), KnownPaths(known), rng)
        assert found is not None
        assert found not in known
        assert PATHS.contains(PATHS.path(found))
        known.append(found)


def test_no_mutant_is_found_where_all_paths_are_known() -> None:
    own = LayerPaths(("a", "b"), 2, 2, 2, 0)
    known = KnownPaths(own.configuration(path) for path in ((0, 1), (0, 3), (2, 1), (2, 3)))
    assert unseen_near(own, own.configuration((0, 1)), known, np.random.default_rng(0)) is None


def test_paths_of_other_merged_models_are_others() -> None:
    own = LayerPaths(("a", "merged"), 2, 2, 2, 0, num_preferences=3)
    known = KnownPaths([own.configuration((2, 3), preference=1)])
    assert own.configuration((2, 3), preference=1) in known
    assert own.configuration((2, 3), preference=2) not in known


def test_the_last_improvement_is_of_any_vector() -> None:
    values = np.array([[0.1, 0.9], [0.8, 0.1], [0.5, 0.2], [0.8, 0.1], [0.1, 0.1]])
    assert last_improvement(values, [(0.0, 1.0)], "weighted_sum") == 0
    assert last_improvement(values, [(0.0, 1.0), (1.0, 0.0)], "weighted_sum") == 1
