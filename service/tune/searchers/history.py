"""The result of each trial at its highest rung, and an order of trials.

These are for searchers that use a result as it is, and do not learn how rungs differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from service.tune.searchers.base import Observation

__all__ = ["Merit", "by_trial", "merit", "violation"]

# Smaller is better, compared from left to right.
Merit: TypeAlias = tuple[int, float, float]


def by_trial(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """The observation of each trial at its highest rung, by trial number.

    A trial that failed counts as failed even if it has results at lower rungs.
    """
    newest: dict[int, Observation] = {}
    for observation in sorted(observations, key=lambda o: (o.number, o.costs is None, o.rung)):
        newest[observation.number] = observation
    return tuple(newest.values())


def violation(observation: Observation) -> float:
    """The total violation of constraints in an observation; 0 if all constraints hold."""
    return sum(max(0.0, value) for value in observation.constraints)


def merit(observation: Observation, cost: float | None = None) -> Merit:
    """A sort key of candidates; a smaller key is better.

    Candidates that meet all constraints come first, by `cost`; then those that violate constraints, by their violation;
    then failures. Without `cost`, the cost of the first objective is used. Deb, "An efficient constraint handling
    method for genetic algorithms" (2000).
    """
    if observation.costs is None:
        return (2, 0.0, 0.0)
    excess = violation(observation)
    return (int(excess > 0), excess, observation.costs[0] if cost is None else cost)
