"""Preference vectors: the importance of each objective, as weights of at least 0 that sum to one.

Weights are in the order of the objectives. Arrays are [num_vectors, num_objectives], float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from search_spaces.errors import InvalidPreference

__all__ = [
    "AUGMENTATION",
    "SMALLEST_WEIGHT",
    "Vectors",
    "augmented_chebyshev",
    "dirichlet",
    "equal_preference",
    "lattice",
    "lattice_size",
    "parse_preference",
    "preference_vector",
    "simplex_lattice",
]

Vectors = NDArray[np.float64]

# The weight of the sum in the augmented Chebyshev function: Knowles 2006, section III-A.
AUGMENTATION = 0.05

# Used instead of a weight of 0 in Chebyshev distances: the objective still breaks ties.
SMALLEST_WEIGHT = 1e-6

# The largest distance of a user's rounded weights' sum from one: three times 0.333 sum to 0.999.
TOLERANCE = 0.005


def equal_preference(num_objectives: int) -> tuple[float, ...]:
    """The preference vector that gives each of `num_objectives` objectives the same weight; the weights sum to 1."""
    return (1 / num_objectives,) * num_objectives


def simplex_lattice(num_objectives: int, *, max_vectors: int) -> Vectors:
    """A regular lattice of at most `max_vectors` preference vectors.

    A preference vector has a weight, at least 0, for each of `num_objectives` objectives; the weights sum to one. The
    lattice has all vectors whose weights are multiples of 1/s. s is the largest number for which there are at most
    `max_vectors` such vectors. With s = 1 there is one vector for each objective. Vectors are in lexicographic order,
    the first objective's weights ascending. Su and Geiping, "Fine, I'll Merge It Myself" (2025), section 3.3.2; Das and
    Dennis, SIAM J. Optim. 8(3), 1998.
    """
    divisions = 1
    if num_objectives > 1:
        while lattice_size(num_objectives, divisions=divisions + 1) <= max_vectors:
            divisions += 1
    return lattice(num_objectives, divisions=divisions)


def lattice(num_objectives: int, *, divisions: int, corners: bool = True, interior: bool = False) -> Vectors:
    """All preference vectors whose weights are multiples of 1/divisions, in lexicographic order.

    A preference vector has a weight, at least 0, for each of `num_objectives` objectives; the weights sum to one. The
    first objective's weights are ascending. Without `corners`, the vectors in which only one objective has a weight
    above 0 are left out. With `interior`, all vectors that have a weight of 0 are left out.
    """
    # Each vector is a placement of num_objectives - 1 bars among the steps: its weights are the gaps between bars.
    last = divisions + num_objectives - 1
    vectors = [np.diff((-1, *bars, last)) - 1 for bars in itertools.combinations(range(last), num_objectives - 1)]
    found = np.array(vectors, dtype=np.float64) / divisions
    is_chosen: NDArray[np.bool_] = found.min(axis=1) > 0 if interior else found.max(axis=1) < 1
    return found[is_chosen] if interior or not corners else found


def lattice_size(num_objectives: int, *, divisions: int, corners: bool = True, interior: bool = False) -> int:
    """The number of preference vectors that the function `lattice` returns for the same arguments.

    A preference vector has a weight for each of `num_objectives` objectives. The weights are multiples of 1/divisions
    and sum to one. Without `corners`, vectors with a single weight above 0 are left out; with `interior`, vectors with
    a weight of 0 are left out.
    """
    if interior:
        return math.comb(divisions - 1, num_objectives - 1)
    return math.comb(divisions + num_objectives - 1, num_objectives - 1) - (0 if corners else num_objectives)


def dirichlet(num_objectives: int, *, num_vectors: int, rng: np.random.Generator, alpha: float = 1.0) -> Vectors:
    """Random preference vectors, drawn from the symmetric Dirichlet distribution with concentration `alpha`.

    There are `num_vectors` vectors with a weight for each of `num_objectives` objectives; the weights of a vector sum
    to one. With `alpha` 1 the vectors are uniformly distributed over all preference vectors. Larger values of `alpha`
    give more equal weights; smaller values favour single objectives. `rng` is the source of randomness.
    """
    return rng.dirichlet(np.full(num_objectives, alpha), num_vectors)


def augmented_chebyshev(gaps: Vectors, vector: ArrayLike, *, rho: float = AUGMENTATION) -> NDArray[np.float64]:
    """The augmented Chebyshev distance of each merge from the best values, [num_merges]; smaller is better.

    `gaps` [num_merges, num_objectives] are each merge's distances from the best value in each objective, and `vector`
    has the weights of the objectives. The result is the largest weighted gap, plus `rho` times the sum of the weighted
    gaps. Every point of a Pareto front has the smallest distance for some weights. With a weighted sum in place of this
    distance, points where the front is not convex would never be the best. Knowles, "ParEGO", IEEE TEC 10(1), 2006,
    equation 2; Su and Geiping, "Fine, I'll Merge It Myself" (2025), equation 3.
    """
    weighted = gaps * np.asarray(vector, dtype=np.float64)
    joined: NDArray[np.float64] = weighted.max(axis=1) + rho * weighted.sum(axis=1)
    return joined


def parse_preference(text: str) -> dict[str, float]:
    """Parse the weight of each objective from text such as "math=0.6,code=0.4".

    The function `preference_vector` checks whether the objectives exist and the weights sum to one. Raises
    InvalidPreference if the text has another form, or names an objective twice.
    """
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, equals, number = (piece.strip() for piece in part.partition("="))
        try:
            weight = float(number)
        except ValueError:
            equals = ""
        if not (name and equals):
            raise InvalidPreference(f"preference: {part.strip()!r} is not OBJECTIVE=WEIGHT; write math=0.6,code=0.4")
        if name in weights:
            raise InvalidPreference(f"preference: {name} is given twice, {weights[name]:g} and {weight:g}")
        weights[name] = weight
    return weights


def preference_vector(weights: Mapping[str, float], *, objectives: Sequence[str]) -> tuple[float, ...]:
    """The preference vector with a user's weights of the objectives, in the order of `objectives`.

    An objective that is not in `weights` has weight 0. Raises InvalidPreference for an unknown objective, a weight that
    is negative or not finite, and a sum that is not one.
    """
    known = frozenset(objectives)
    for name, weight in weights.items():
        if name not in known:
            raise InvalidPreference(
                f"preference: {name!r} is not an objective; give weights of {', '.join(objectives)}"
            )
        if not (math.isfinite(weight) and weight >= 0):
            raise InvalidPreference(f"preference: {name}={weight:g} is not accepted; give a number from 0 to 1")
    total = math.fsum(weights.values())
    if abs(total - 1) > TOLERANCE:
        shown = ", ".join(f"{name}={weight:g}" for name, weight in weights.items()) or "no weights"
        hint = f"; for the same proportions: {_rescaled(weights, total)}" if total > 0 else ""
        raise InvalidPreference(f"preference: {shown} sum to {total:g}, not to 1{hint}")
    return tuple(weights.get(name, 0.0) / total for name in objectives)


def _rescaled(weights: Mapping[str, float], total: float) -> str:
    return ", ".join(f"{name}={weight / total:.3g}" for name, weight in weights.items())
