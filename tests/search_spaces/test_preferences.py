"""Preference vectors: the lattice on the simplex, draws from it, and a user's own vectors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from search_spaces.errors import InvalidPreference
from search_spaces.preferences import (
    augmented_chebyshev,
    dirichlet,
    lattice,
    lattice_size,
    parse_preference,
    preference_vector,
    simplex_lattice,
)


def test_a_lattice_has_every_vector_of_its_steps_once() -> None:
    assert simplex_lattice(3, max_vectors=6).tolist() == [
        [0.0, 0.0, 1.0],
        [0.0, 0.5, 0.5],
        [0.0, 1.0, 0.0],
        [0.5, 0.0, 0.5],
        [0.5, 0.5, 0.0],
        [1.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize(("num_objectives", "divisions"), [(2, 4), (3, 7), (3, 3), (3, 2), (4, 6)])
def test_the_interior_of_a_lattice_has_no_weight_of_0(num_objectives: int, divisions: int) -> None:
    found = lattice(num_objectives, divisions=divisions, interior=True)
    every = lattice(num_objectives, divisions=divisions)
    assert found.tolist() == [vector.tolist() for vector in every if vector.min() > 0]
    assert len(found) == lattice_size(num_objectives, divisions=divisions, interior=True)


@pytest.mark.parametrize(
    ("num_objectives", "max_vectors", "steps"),
    [(1, 30, 1), (2, 30, 29), (2, 2, 1), (3, 30, 6), (3, 27, 5), (3, 91, 12), (5, 100, 4), (40, 30, 1)],
)
def test_a_lattice_has_the_most_vectors_that_fit(num_objectives: int, max_vectors: int, steps: int) -> None:
    # Su and Geiping, section 3.3.2, for three objectives: (s + 2) over 2 vectors.
    lattice = simplex_lattice(num_objectives, max_vectors=max_vectors)
    assert lattice.shape == (math.comb(steps + num_objectives - 1, num_objectives - 1), num_objectives)
    assert np.allclose(lattice.sum(axis=1), 1)
    assert np.allclose(lattice * steps, np.round(lattice * steps))
    assert len(np.unique(lattice, axis=0)) == len(lattice)


@pytest.mark.parametrize(("num_objectives", "divisions"), [(1, 5), (2, 4), (3, 3), (4, 2)])
def test_a_lattice_of_some_divisions_has_all_their_multiples(num_objectives: int, divisions: int) -> None:
    vectors = lattice(num_objectives, divisions=divisions)
    counts = itertools.product(range(divisions + 1), repeat=num_objectives)
    expected = [[count / divisions for count in each] for each in counts if sum(each) == divisions]
    assert vectors.tolist() == expected
    assert lattice_size(num_objectives, divisions=divisions) == len(expected)
    inner = lattice(num_objectives, divisions=divisions, corners=False)
    assert inner.tolist() == [vector for vector in vectors.tolist() if max(vector) < 1]
    assert lattice_size(num_objectives, divisions=divisions, corners=False) == len(inner)


def test_alpha_of_drawn_preferences() -> None:
    """A large alpha draws near equal weights, a small one near single objectives."""
    near, far = (dirichlet(3, num_vectors=200, rng=np.random.default_rng(1), alpha=alpha) for alpha in (100.0, 0.05))
    assert np.abs(near - 1 / 3).max() < 0.2
    assert np.median(far.max(axis=1)) > 0.95


def test_draws_are_preference_vectors_and_repeatable() -> None:
    first, again = (dirichlet(3, num_vectors=500, rng=np.random.default_rng(1)) for _ in range(2))
    assert np.array_equal(first, again)
    assert np.allclose(first.sum(axis=1), 1)
    assert (first >= 0).all()
    assert np.allclose(first.mean(axis=0), 1 / 3, atol=0.05)


def test_a_users_weights_are_put_in_the_objectives_order() -> None:
    objectives = ("math", "text", "code")
    assert preference_vector({"code": 0.4, "math": 0.6}, objectives=objectives) == (0.6, 0.0, 0.4)
    thirds = preference_vector(dict.fromkeys(objectives, 0.333), objectives=objectives)
    assert math.fsum(thirds) == pytest.approx(1.0, abs=1e-12)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (
            {"math": 0.6, "code": 0.6},
            r"preference: math=0.6, code=0.6 sum to 1.2, not to 1; for the same proportions: math=0.5, code=0.5",
        ),
        ({"math": 3, "text": 1}, r"sum to 4, not to 1; for the same proportions: math=0.75, text=0.25"),
        ({"math": 0.0}, r"preference: math=0 sum to 0, not to 1$"),
        ({}, r"preference: no weights sum to 0, not to 1$"),
        ({"math": 1.5, "code": -0.5}, r"preference: code=-0.5 is not accepted; give a number from 0 to 1"),
        ({"math": math.nan}, r"preference: math=nan is not accepted"),
        ({"maths": 1.0}, r"preference: 'maths' is not an objective; give weights of math, text, code"),
    ],
)
def test_weights_that_are_no_preference_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(InvalidPreference, match=message):
        preference_vector(weights, objectives=("math", "text", "code"))


# What weights pick.


def test_every_front_point_can_be_picked() -> None:
    """Some preference vector picks each point of a front, even where it is not convex.

    The middle of this front is above the line between its ends: no weighted sum is smallest there.
    """
    gaps = np.array([[0.0, 1.0], [0.6, 0.6], [1.0, 0.0]])
    shares = np.linspace(0, 1, 21)
    picked = {int(np.argmin(augmented_chebyshev(gaps, (share, 1 - share)))) for share in shares}
    by_sum = {int(np.argmin(gaps @ (share, 1 - share))) for share in shares}
    assert (picked, by_sum) == ({0, 1, 2}, {0, 2})


def test_augmented_chebyshev_value() -> None:
    """The scalarisation is the largest weighted gap plus a small multiple of their sum."""
    found = augmented_chebyshev(np.array([[0.2, 0.5], [0.4, 0.0]]), (0.75, 0.25), rho=0.1)
    assert found == pytest.approx([0.15 + 0.1 * (0.15 + 0.125), 0.3 + 0.1 * 0.3])


def test_smaller_sum_breaks_ties() -> None:
    """Of two points with the same largest gap, the one with the smaller sum is nearer."""
    near, far = augmented_chebyshev(np.array([[0.5, 0.1], [0.5, 0.4]]), (0.5, 0.5))
    assert near < far


# What people write.


def test_weights_are_read_as_they_are_written() -> None:
    assert parse_preference("math=0.6,code=0.4") == {"math": 0.6, "code": 0.4}
    assert parse_preference(" math = 1 ") == {"math": 1.0}
    assert parse_preference("a.b-c=5e-1,d=.5") == {"a.b-c": 0.5, "d": 0.5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"'' is not OBJECTIVE=WEIGHT; write math=0.6,code=0.4"),
        ("math", r"'math' is not OBJECTIVE=WEIGHT"),
        ("=0.5", r"'=0.5' is not OBJECTIVE=WEIGHT"),
        ("math=much", r"'math=much' is not OBJECTIVE=WEIGHT"),
        ("math=0.6,", r"'' is not OBJECTIVE=WEIGHT"),
        ("math=0.6;code=0.4", r"'math=0.6;code=0.4' is not OBJECTIVE=WEIGHT"),
        ("math=0.6,math=0.4", r"math is given twice, 0.6 and 0.4"),
    ],
)
def test_what_are_no_weights_is_quoted(text: str, message: str) -> None:
    with pytest.raises(InvalidPreference, match=message):
        parse_preference(text)
