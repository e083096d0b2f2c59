"""Proposals halfway between two trials of the Pareto front.

The mean of the coefficients of two good compromises between objectives is mostly another good compromise. Merges are
averages of models, and losses of models that were fine-tuned from one base change smoothly along the line between them
(linear mode connectivity: Frankle et al., ICML 2020; for fronts: Rame et al., "Rewarded soups", NeurIPS 2023).
Therefore a trial in the middle of a gap of the front costs one evaluation and no gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from search_spaces.objectives import Candidate, constrained_front, crowding_distances, hypervolume
from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.encoding import Encoding
from service.tune.searchers.history import by_trial, violation

__all__ = ["midpoint"]

# Largest numbers of trials that are paired, the least crowded ones, so that proposals stay fast: in general, and from
# MANY_OBJECTIVES on, where hypervolumes take long.
MAX_PARENTS, MAX_PARENTS_OF_MANY, MANY_OBJECTIVES = 64, 12, 6


def midpoint(context: ProposalContext) -> dict[str, Any] | None:
    """The midpoint of two trials of the Pareto front that is expected to add most to the hypervolume.

    `context` has the trials' results; the front is computed from the trials at the highest rung (number of samples)
    that any trial has reached. A midpoint has the mean of both trials' parameters, which must all be numbers. Its costs
    are estimated as the means of the costs of both trials. Returns None if no midpoint would add to the hypervolume.
    """
    encoding = Encoding(context.parameters)
    parents = _parents(context.observations)
    costs = [parent.costs for parent in parents if parent.costs is not None]
    rows = encoding.encode(parent.configuration for parent in parents)
    pairs = list(itertools.combinations(range(len(parents)), 2))
    middles = encoding.normalise(
        np.array([(rows[a] + rows[b]) / 2 for a, b in pairs]).reshape(-1, len(context.parameters))
    )
    expected = [tuple(((np.array(costs[a]) + np.array(costs[b])) / 2).tolist()) for a, b in pairs]
    # A midpoint whose trial is running counts with its estimated costs.
    costs += itertools.compress(expected, encoding.are_known(middles, context.pending))
    reached = hypervolume(costs)
    taken = encoding.are_known(middles, context.known_configurations())
    gains = [
        0.0 if is_taken else hypervolume([*costs, cost]) - reached
        for cost, is_taken in zip(expected, taken, strict=True)
    ]
    best = int(np.argmax(gains)) if gains else None
    return None if best is None or gains[best] <= 0 else encoding.decode(middles[best])


def _parents(observations: Iterable[Observation]) -> list[Observation]:
    scored = [trial for trial in by_trial(observations) if trial.costs is not None]
    highest = max((trial.rung for trial in scored), default=0)
    compared = [trial for trial in scored if trial.rung == highest]
    candidates = [Candidate(trial.number, trial.costs, violation(trial)) for trial in compared]
    front = [trial for trial, is_on in zip(compared, constrained_front(candidates), strict=True) if is_on]
    costs = [trial.costs for trial in front if trial.costs is not None]
    crowding = dict(zip((trial.number for trial in front), crowding_distances(costs), strict=True))
    most = MAX_PARENTS if not costs or len(costs[0]) < MANY_OBJECTIVES else MAX_PARENTS_OF_MANY
    kept = sorted(front, key=lambda trial: (-crowding[trial.number], trial.number))[:most]
    return sorted(kept, key=lambda trial: trial.number)
