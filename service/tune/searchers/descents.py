"""Gradient descents of a search, one for each preference vector: their order, and where each descent starts.

The first descent is for the preference vector nearest to equal weights. Each later descent is for the remaining vector
with the smallest distance to a vector of an earlier descent. It starts at the end of the earlier descent with the
nearest vector, so that few steps are enough. Distances are Euclidean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from search_spaces.preferences import equal_preference
from search_spaces.study.search import GradientOptions

__all__ = ["Descent", "descents_of", "fitting_points", "num_steps_for", "place_of"]

# Decimals to which distances are compared: neighbours on a lattice are equally far.
DECIMALS = 9


@dataclass(frozen=True)
class Descent:
    """A gradient descent for one preference vector, whose points at regular intervals become trials.

    - `preference`: the preference vector, the importance of each objective
    - `neighbours`: the numbers of the earlier descents, sorted by the similarity of their preference vectors to this
      one, the most similar first; the descent starts at the end of the first of them that did not fail
    - `num_steps`: the number of gradient steps
    - `num_points`: the number of points that become trials; they are evenly spaced, and the last is the end of the
      descent
    - `learning_rate`: the learning rate of the first step
    - `is_constant`: whether all steps have the learning rate of the first step; otherwise, the learning rate falls
      linearly from step to step
    """

    preference: tuple[float, ...]
    neighbours: tuple[int, ...]
    num_steps: int
    num_points: int
    learning_rate: float
    is_constant: bool = False

    def num_steps_to(self, point: int) -> int:
        """Number of gradient steps from the start of the descent to the trial with the index `point`.

        The trials of a descent are indexed from 0.
        """
        return -(-self.num_steps * (point + 1) // self.num_points)


@lru_cache(maxsize=8)
def descents_of(options: GradientOptions, vectors: tuple[tuple[float, ...], ...]) -> tuple[Descent, ...]:
    """The gradient descents of a search in the order in which they run, one for each preference vector in `vectors`.

    A preference vector has the weights of the objectives. The option `points` says how many points of all descents
    together become trials. The descents get equal shares of this number, at least one point each; the first descent
    also gets the remainder.
    """
    steps, warm_steps = options.steps, _warm_steps(options)
    num_points = _later_points(options, len(vectors))
    first_points = max(1, options.points - (len(vectors) - 1) * num_points)
    order = _order(np.array(vectors))
    return tuple(
        Descent(
            preference=vectors[vector],
            neighbours=neighbours,
            num_steps=warm_steps if number else steps,
            num_points=num_points if number else first_points,
            learning_rate=options.learning_rate * (options.warm_rate if number else 1),
            is_constant=options.schedule == "constant",
        )
        for number, (vector, neighbours) in enumerate(order)
    )


def fitting_points(options: GradientOptions, *, num_vectors: int, max_trials: int) -> int:
    """The option `points`, or the largest smaller number of points that fits a search for `num_vectors` vectors.

    A number of points fits if every point becomes one of `max_trials` trials, so that descents end, and if no descent
    has more points than gradient steps, so that no two points are equal. There is at least one point for each vector.
    """
    different = options.steps + (num_vectors - 1) * _later_points(options, num_vectors)
    return min(options.points, different, max(max_trials, num_vectors))


def place_of(index: int, descents: Sequence[Descent]) -> tuple[int, int] | None:
    """Number of the gradient descent, and of the point on it, from which the proposal with index `index` is made.

    Some points of each descent become proposals; the proposals of the first descent come first. Proposals are counted
    from 0 without baselines. Returns the number of the descent and the index of the point among its proposed points.
    Returns None if the proposal comes after the points of all descents.
    """
    for number, descent in enumerate(descents):
        if index < descent.num_points:
            return number, index
        index -= descent.num_points
    return None


def num_steps_for(num_proposals: int, descents: Sequence[Descent]) -> int:
    """Number of gradient steps that must be made before the first `num_proposals` proposals are known.

    A proposal is a point of one of the gradient `descents`, which run one after another. Baselines are not counted.
    """
    total = 0
    for descent in descents:
        if num_proposals <= 0:
            break
        total += descent.num_steps_to(min(num_proposals, descent.num_points) - 1)
        num_proposals -= descent.num_points
    return total


def _warm_steps(options: GradientOptions) -> int:
    return max(1, options.steps // 4) if options.warm_steps is None else options.warm_steps


def _later_points(options: GradientOptions, num_vectors: int) -> int:
    """Number of points of each descent after the first, in a search for `num_vectors` preference vectors."""
    return min(max(1, options.points // num_vectors), _warm_steps(options))


def _order(vectors: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    """The order of the gradient descents, one for each of the preference vectors [num_vectors, num_objectives].

    The first descent is for the vector nearest to equal weights. Each later descent is for the remaining vector with
    the smallest distance to a vector that is already in the order. The result has, for each descent, the index of its
    vector and the numbers of all earlier descents, the one with the nearest vector first. At equal distances the
    earlier descent comes first.
    """
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=2).round(DECIMALS)
    equal = equal_preference(vectors.shape[1])
    # For the first descent, the distance to equal weights; later, the distance to the nearest vector in the order.
    nearest = np.linalg.norm(vectors - np.array(equal), axis=1).round(DECIMALS)
    order: list[int] = []
    found: list[tuple[int, tuple[int, ...]]] = []
    for _ in vectors:
        vector = int(nearest.argmin())
        neighbours = np.argsort(apart[vector, order], kind="stable")
        found.append((vector, tuple(neighbours.tolist())))
        nearest = np.minimum(nearest, apart[vector]) if order else apart[vector].copy()
        order.append(vector)
        nearest[order] = np.inf
    return found
