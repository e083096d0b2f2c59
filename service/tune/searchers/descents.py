"""The descents of a search by gradients: one for each preference vector, in an order in which neighbours follow.

The first is at the preference vector nearest to equal weights. Each later one is at the vector nearest to those that
had theirs, and starts at the end of the nearest: a short one is enough there. Distances are Euclidean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from search_spaces.preferences import equal_preference
from search_spaces.study.sections import GradientOptions

__all__ = ["Descent", "descents_of", "place_of"]

# Distances are compared to so many decimals: neighbours on a lattice are equally far.
DECIMALS = 9


@dataclass(frozen=True)
class Descent:
    """`num_steps` gradients at one preference vector; `num_points` of its points become trials, evenly spaced, the
    last is its end. `neighbours` are the earlier descents, the nearest first. The learning rate falls linearly from
    `learning_rate` at the first step."""

    preference: tuple[float, ...]
    neighbours: tuple[int, ...]
    num_steps: int
    num_points: int
    learning_rate: float

    def num_steps_to(self, point: int) -> int:
        """How many gradients lead to its trial `point`, from 0."""
        return -(-self.num_steps * (point + 1) // self.num_points)


@lru_cache(maxsize=8)
def descents_of(options: GradientOptions, vectors: tuple[tuple[float, ...], ...]) -> tuple[Descent, ...]:
    """The descents in their order, one for each preference vector.

    `options.points` are shared equally, and the first descent has the remainder; each has at least one."""
    steps, count = options.steps, len(vectors)
    warm_steps = max(1, steps // 4) if options.warm_steps is None else options.warm_steps
    num_points = min(max(1, options.points // count), warm_steps)
    first_points = max(1, options.points - (count - 1) * num_points)
    order = _order(np.array(vectors))
    return tuple(
        Descent(
            preference=vectors[vector],
            neighbours=neighbours,
            num_steps=warm_steps if number else steps,
            num_points=num_points if number else first_points,
            learning_rate=options.learning_rate * (options.warm_rate if number else 1),
        )
        for number, (vector, neighbours) in enumerate(order)
    )


def place_of(index: int, descents: Sequence[Descent]) -> tuple[int, int] | None:
    """Which descent, and which of its points, proposal `index` is; None if it comes after all."""
    for number, descent in enumerate(descents):
        if index < descent.num_points:
            return number, index
        index -= descent.num_points
    return None


def _order(vectors: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    """Each vector's index in the order of descents, and the places in this order of those before it, nearest first;
    of equally near ones, the one with the lower place."""
    apart = np.linalg.norm(vectors[:, None] - vectors[None], axis=2).round(DECIMALS)
    equal = equal_preference(vectors.shape[1])
    nearest = np.linalg.norm(vectors - np.array(equal), axis=1).round(
        DECIMALS
    )  # to equal weights, then to those in the order
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
