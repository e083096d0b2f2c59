"""Gradient descent with Adam, and the draw of the samples (minibatch) of each gradient.

Adam is algorithm 1 of Kingma and Ba, "Adam: A Method for Stochastic Optimization", 2015. The moments are not kept
between steps: each point is computed anew from the start of its descent and the stored gradients of all earlier steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Float, Parameters
from service.store.steps import GradientStep
from service.tune.searchers.base import proposal_generator

__all__ = ["Point", "minibatch", "numbers_of", "point_after", "share_of"]

Point = NDArray[np.float64]

BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8

# The learning rate falls linearly to this share of its first value.
LAST_RATE = 5e-4

# Minibatches are drawn with the random generators of proposal numbers from this number on; no trial has such a number.
BATCHES = 10**9


def numbers_of(parameters: Parameters) -> list[Float]:
    return [parameter for parameter in parameters if isinstance(parameter, Float)]


def point_after(
    parameters: Parameters,
    start: Point,
    done: Sequence[GradientStep],
    *,
    num_steps: int,
    learning_rate: float,
    is_constant: bool = False,
) -> Point:
    """The point that Adam reaches from `start` with the gradients of the steps `done`.

    A point has one value for each of the search space's `parameters`, and is kept within their ranges after each step.
    `num_steps` is the number of steps of the whole descent. The learning rate is `learning_rate` at the first step, and
    falls linearly with the steps, unless `is_constant` is True.
    """
    numbers = numbers_of(parameters)
    low, high = np.array([p.low for p in numbers]), np.array([p.high for p in numbers])
    point = start
    mean, square = np.zeros_like(point), np.zeros_like(point)
    for number, step in enumerate(done):
        gradient = np.array(step.result.gradient)
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = BETA2 * square + (1 - BETA2) * gradient**2
        rate = learning_rate if is_constant else learning_rate * (1 - number / num_steps + LAST_RATE)
        direction = mean / (1 - BETA1 ** (number + 1))
        size = np.sqrt(square / (1 - BETA2 ** (number + 1))) + EPSILON
        point = np.clip(point - rate * direction / size, low, high)
    return point


def share_of(batch: int, num_objectives: int) -> int:
    """The number of samples per objective in a minibatch; it is at least one.

    The minibatch divides `batch` samples equally among `num_objectives` objectives.
    """
    return max(1, batch // num_objectives)


def minibatch(
    positions: Mapping[str, Sequence[int]],
    before: Sequence[GradientStep],
    *,
    share: int,
    indices: Mapping[str, int],
    seed: int,
) -> dict[str, tuple[int, ...]]:
    """Draw the samples for the next gradient: for each objective, `share` sample positions in ascending order.

    A position is a sample's index in the order in which the objective's samples are scored.

    - `positions`: the sample positions to draw from, keyed by objective
    - `before`: the earlier gradient steps; every sample is drawn once before any sample is drawn again
    - `indices`: the index of each objective among the study's objectives, so that each has its own random order
    - `seed`: the seed of the random order
    """
    batch = {}
    for name, known in positions.items():
        num_before = sum(len(step.request.positions.get(name, ())) for step in before)
        drawn: list[int] = []
        for count in range(num_before, num_before + share):
            epoch, offset = divmod(count, len(known))
            if not drawn or offset == 0:
                rng = proposal_generator(seed=seed, number=BATCHES + epoch * 1000 + indices[name])
                order = rng.permutation(len(known))
            drawn.append(known[int(order[offset])])
        batch[name] = tuple(sorted(drawn))
    return batch
