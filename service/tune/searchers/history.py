"""What the observations say about each trial, and which of two trials is better, for searchers that take a result as
it is and do not learn how rungs differ."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from service.tune.searchers.base import Observation

__all__ = ["Merit", "by_trial", "merit", "violation"]

# Smaller is better, compared from left to right.
Merit: TypeAlias = tuple[int, float, float]


def by_trial(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """Each trial at the highest rung that it has a result of, by trial number. A trial that failed has failed,
    whatever it reached before."""
    newest: dict[int, Observation] = {}
    for observation in sorted(observations, key=lambda o: (o.number, o.costs is None, o.rung)):
        newest[observation.number] = observation
    return tuple(newest.values())


def violation(observation: Observation) -> float:
    """By how much constraints are violated, in total; 0 if the candidate is feasible."""
    return sum(max(0.0, value) for value in observation.constraints)


def merit(observation: Observation, cost: float | None = None) -> Merit:
    """The order of candidates: feasible ones by `cost`, by default that of the only objective, then infeasible ones by
    their violation, then failures. Deb, "An efficient constraint handling method for genetic algorithms" (2000)."""
    if observation.costs is None:
        return (2, 0.0, 0.0)
    excess = violation(observation)
    return (int(excess > 0), excess, observation.costs[0] if cost is None else cost)
