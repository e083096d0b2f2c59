"""Points halfway between two trials of a front.

Coefficients between those of two good compromises are mostly a good compromise between the two: merges are averages of
models, and losses of models that were fine-tuned from one base change smoothly along the line between them (linear mode
connectivity: Frankle et al., ICML 2020; of fronts: Rame et al., "Rewarded soups", NeurIPS 2023). So where a front has a
gap, a trial in its middle costs one evaluation, and no gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations
from typing import Any

import numpy as np

from search_spaces.objectives import Candidate, constrained_front, crowding_distances, hypervolume
from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.encoding import Encoding
from service.tune.searchers.history import by_trial, violation

__all__ = ["midpoint"]

# Of more trials than this the least crowded are paired, so that proposals stay fast. Hypervolumes of many objectives
# take long.
MAX_PARENTS, MAX_PARENTS_OF_MANY, MANY_OBJECTIVES = 64, 12, 6


def midpoint(context: ProposalContext) -> dict[str, Any] | None:
    """Of all pairs of trials on the front, the middle of the one that would add most to its hypervolume if costs there
    were the mean of the pair's; None if no pair is left whose middle would add anything.

    The front is that of the trials at the highest rung that any has reached. All parameters are numbers."""
    encoding = Encoding(context.parameters)
    known = encoding.encode(context.known_configurations())
    taken = set(encoding.keys(known))
    parents = _parents(context.observations)
    costs = [parent.costs for parent in parents if parent.costs is not None]
    rows = encoding.encode(parent.configuration for parent in parents)
    pairs = list(combinations(range(len(parents)), 2))
    middles = encoding.normalise(
        np.array([(rows[a] + rows[b]) / 2 for a, b in pairs]).reshape(-1, len(context.parameters))
    )
    expected = [tuple(((np.array(costs[a]) + np.array(costs[b])) / 2).tolist()) for a, b in pairs]
    keys = encoding.keys(middles)
    # A middle whose trial runs counts as if it had turned out as expected.
    waiting = set(encoding.keys(encoding.encode(context.pending)))
    costs += [cost for cost, key in zip(expected, keys, strict=True) if key in waiting]
    reached = hypervolume(costs)
    gains = [
        0.0 if key in taken else hypervolume([*costs, cost]) - reached for cost, key in zip(expected, keys, strict=True)
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
