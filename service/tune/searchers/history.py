"""The result of each trial at its highest rung, and the sorting of trials by their results.

Searchers that use results at different rungs, and do not learn how rungs differ, use these functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeAlias

from search_spaces.objectives import Candidate, promotion_order
from service.tune.searchers.base import Observation, ProposalContext

__all__ = ["Merit", "by_trial", "merit", "thinned", "violation"]

# The first version of searchers that leave observations out in which failed trials come after all others.
FIRST_WITH_FAILURES_LAST = 4

# Smaller is better, compared from left to right.
Merit: TypeAlias = tuple[int, float, float]


def by_trial(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """One observation for each trial, sorted by trial number: its result at the highest rung that it has reached.

    A rung is a number of samples at which trials are compared. A trial that failed counts as failed even if it has
    results at lower rungs.
    """
    newest: dict[int, Observation] = {}
    for observation in sorted(observations, key=lambda o: (o.number, o.costs is None, o.rung)):
        newest[observation.number] = observation
    return tuple(newest.values())


def thinned(context: ProposalContext, *, max_numbers: int, max_rows: int = 10**9, group: int = 1) -> ProposalContext:
    """Leave out observations (results of trials) of a context, so that a searcher's model can be fitted quickly.

    A searcher fits its model again for every proposal, which takes too long with many observations of many parameters.
    The table of observations [num_observations, num_parameters] may have at most `max_rows` rows and `max_numbers`
    numbers. If it is larger, trials are left out:

    - Half of the trials that are kept are the newest trials.
    - The other half are the best earlier trials. Trials that were scored on more samples count as better; among trials
      with equal numbers of samples, the order of promotion decides. Failed trials come last.
    - For searchers that divide the trials into generations of `group` trials, the number of trials that are left out is
      a multiple of `group`.

    Trials stay in their order. A study that was created with version 1 of its searcher keeps all observations. In
    studies of versions 2 and 3, failed trials count as scored on all samples.
    """
    rows = min(max_rows, max_numbers // max(1, len(context.parameters)))
    version = context.setting.version
    if version == 1 or len(context.observations) <= rows:
        return context
    trials = by_trial(context.observations)
    num_kept = rows * len(trials) // len(context.observations) // 2
    num_kept = max(group, num_kept - num_kept % group)
    first = max(0, len(trials) - num_kept)
    before, newest = trials[: first - first % group], trials[first - first % group :]
    order = promotion_order([Candidate(trial.number, trial.costs, violation(trial)) for trial in before])
    has_failures_last = version is None or version >= FIRST_WITH_FAILURES_LAST
    key = {t.number: (has_failures_last and t.costs is None, -t.rung) for t in before}  # failures have the last rung
    best = sorted(order, key=key.__getitem__)[:num_kept]  # stable: the order of promotion within a rung
    kept = {*best, *(trial.number for trial in newest)}
    return replace(context, observations=tuple(o for o in context.observations if o.number in kept))


def violation(observation: Observation) -> float:
    """The total violation of constraints in an observation (a trial's result); 0 if all constraints hold."""
    return sum(max(0.0, value) for value in observation.constraints)


def merit(observation: Observation, cost: float | None = None) -> Merit:
    """A key that sorts observations (results of trials) from the best to the worst.

    Observations that meet all constraints come first, sorted by `cost`. Observations that violate constraints follow,
    sorted by the total violation, and failures come last. `cost` is the observation's cost; if it is None, the cost of
    the first objective is used. The order is taken from Deb, "An efficient constraint handling method for genetic
    algorithms" (2000).
    """
    if observation.costs is None:
        return (2, 0.0, 0.0)
    excess = violation(observation)
    return (int(excess > 0), excess, observation.costs[0] if cost is None else cost)
