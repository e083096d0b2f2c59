"""Objectives and their costs, and the comparison of trials in several objectives.

All comparisons use costs: 0 is best, 1 is worst, smaller is better. Therefore the hypervolume of all studies has the
same reference point, 1.1 in every objective. Values are in the metric's own unit and direction.

Non-dominated ranks and crowding distances follow Deb et al., "NSGA-II" (2002), sections III-A and III-B. The library
moocore computes ranks, fronts and hypervolumes. Functions import it when they need it, because loading takes 0.1 s or
more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from search_spaces.constraints import Constraint
from search_spaces.errors import InvalidStudy, Problem

__all__ = [
    "COSTS",
    "REFERENCE_COST",
    "Candidate",
    "Cost",
    "Costs",
    "Direction",
    "Objective",
    "constrained_dominates",
    "constrained_front",
    "crowding_distances",
    "dominates",
    "hypervolume",
    "non_dominated",
    "non_dominated_ranks",
    "promotion_order",
]

Direction = Literal["maximize", "minimize"]
# Costs that follow from a recipe alone (`search_spaces.costs`).
Cost = Literal["layers", "parameters"]
COSTS: tuple[Cost, ...] = ("layers", "parameters")
Costs: TypeAlias = tuple[float, ...]

# The reference point of every hypervolume, in each objective: just beyond the worst cost, so that a front's extreme
# points add volume.
REFERENCE_COST = 1.1


# Metrics of lm-eval whose values exceed 1 although larger is better.
SCALED_METRICS = frozenset({"bleu", "chrf", "likelihood"})


@dataclass(frozen=True)
class Objective:
    """A metric and its direction of optimisation.

    `range` is the [lowest, highest] value of the metric, by default [0, 1]. `constraints` are bounds on the objective's
    values. `cost_of_recipe` names a cost that follows from the recipe ("layers" or "parameters"): the objective then
    has no samples, and its values are exact.

    Raises InvalidStudy if `range` is missing although the metric is minimised, as perplexity is, or is known to have
    values outside [0, 1], as BLEU has.
    """

    name: str
    metric: str
    direction: Direction
    range: tuple[float, float] | None = None
    constraints: tuple[Constraint, ...] = ()
    cost_of_recipe: Cost | None = None

    def __post_init__(self) -> None:
        if self.range is None and (self.direction == "minimize" or self.metric in SCALED_METRICS):
            raise _needs_range(f"objective {self.name!r}: {self.metric} ({self.direction}d) is not a share in [0, 1]")
        if self.range is not None and not self.range[0] < self.range[1]:
            raise InvalidStudy((Problem("", f"objective {self.name!r}: range {list(self.range)} is empty"),))

    @property
    def bounds(self) -> tuple[float, float]:
        """The metric's [lowest, highest] value: the field `range`, or [0, 1] if the field is None."""
        return self.range or (0.0, 1.0)

    def cost(self, value: float) -> float:
        """The cost of a value: 0 at the better end of the range, 1 at the worse end.

        Costs are not clipped to [0, 1], so they keep the order of values outside the range. Raises InvalidStudy if no
        range is stated and `value` is outside [0, 1], and ValueError if `value` is not finite.
        """
        if not math.isfinite(value):
            raise ValueError(f"objective {self.name!r}: {self.metric}={value} is not a finite number")
        low, high = self.bounds
        if self.range is None and not low <= value <= high:
            raise _needs_range(f"objective {self.name!r}: {self.metric}={value:g} is outside [0, 1]")
        return self.cost_of_stored(value)

    def cost_of_stored(self, value: float) -> float:
        """The cost of any value, without the checks of the method `cost`, so that stored results can always be shown.

        The cost is 0 at the better end of the range and 1 at the worse end.
        """
        low, high = self.bounds
        share = (value - low) / (high - low)
        return 1 - share if self.direction == "maximize" else share

    def is_better(self, value: float, than: float) -> bool:
        """Whether `value` is strictly better than `than`; both are values of the objective."""
        return value > than if self.direction == "maximize" else value < than


def _needs_range(claim: str) -> InvalidStudy:
    return InvalidStudy((Problem("", f"{claim}; state where its values lie, e.g. range: [0, 100]"),))


@dataclass(frozen=True)
class Candidate:
    """A trial with its costs, as a candidate for promotion or for a Pareto front.

    Promotion is to the next rung of successive halving. `number` is the trial's number. `costs` is None if the trial
    failed. `violation` is the sum of the trial's constraint violations, 0 if all constraints hold.
    """

    number: int
    costs: Costs | None
    violation: float = 0.0


def dominates(costs: Costs, other: Costs) -> bool:
    """Whether `costs` dominates `other`: no cost is larger than the same cost in `other`, and one is smaller."""
    return all(a <= b for a, b in zip(costs, other, strict=True)) and costs != other


def constrained_dominates(candidate: Candidate, other: Candidate) -> bool:
    """Whether `candidate` violates constraints less than `other`, or violates them equally and dominates it by costs.

    A failed candidate dominates no other. The rule is definition 1 of Deb et al., "NSGA-II" (2002), with one
    difference: between two candidates that violate constraints equally the costs decide, while in the paper neither
    dominates the other.
    """
    if candidate.costs is None or other.costs is None:
        return candidate.costs is not None and other.costs is None
    if candidate.violation != other.violation:
        return candidate.violation < other.violation
    return dominates(candidate.costs, other.costs)


def constrained_front(candidates: Sequence[Candidate]) -> tuple[bool, ...]:
    """Whether each candidate is on the Pareto front under constraints: no other candidate dominates it.

    The function `constrained_dominates` defines dominance. Only the candidates with the smallest violation of
    constraints can be on the front. If some candidates meet all constraints, the front has only such candidates. No
    candidate may have failed.
    """
    least = min((candidate.violation for candidate in candidates), default=0.0)
    kept = [c.costs for c in candidates if c.costs is not None and c.violation == least]
    flags = iter(non_dominated(kept))
    return tuple(c.costs is not None and c.violation == least and next(flags) for c in candidates)


def non_dominated_ranks(costs: Sequence[Costs]) -> tuple[int, ...]:
    """The non-dominated rank of each point: 0 on the Pareto front, 1 on the front of the remaining points, and so on.

    `costs` has the costs of each point, one for each objective; smaller is better. Equal points have equal ranks.
    """
    from moocore import pareto_rank

    return tuple(pareto_rank(np.array(costs)).tolist()) if costs else ()


def non_dominated(costs: Sequence[Costs]) -> tuple[bool, ...]:
    """Whether each point is on the Pareto front: no other point dominates it.

    `costs` has the costs of each point, one for each objective; smaller is better. Equal points are on the front
    together.
    """
    from moocore import is_nondominated

    return tuple(is_nondominated(np.array(costs), keep_weakly=True).tolist()) if costs else ()


def crowding_distances(costs: Sequence[Costs]) -> tuple[float, ...]:
    """The crowding distance of each point of one Pareto front; a larger distance means fewer points nearby.

    `costs` has the costs of each point, one for each objective. The best and the worst point of each objective have
    infinite distance.
    """
    distances = [0.0] * len(costs)
    for objective in range(len(costs[0]) if costs else 0):
        order = sorted(range(len(costs)), key=lambda i: costs[i][objective])
        low, high = costs[order[0]][objective], costs[order[-1]][objective]
        if low == high:
            continue
        distances[order[0]] = distances[order[-1]] = math.inf
        for before, i, after in zip(order, order[1:], order[2:], strict=False):
            distances[i] += (costs[after][objective] - costs[before][objective]) / (high - low)
    return tuple(distances)


def promotion_order(candidates: Sequence[Candidate]) -> tuple[int, ...]:
    """Trial numbers in the order of promotion to the next rung of successive halving.

    Candidates that meet all constraints come first: by non-dominated rank, then crowding distance (larger first), then
    trial number. Candidates that violate constraints follow, in the order of increasing violation. Failed candidates
    are last. With one objective and no constraints this is the order of cost, then trial number.
    """
    scored = [candidate for candidate in candidates if candidate.costs is not None and candidate.violation == 0]
    costs = [candidate.costs for candidate in scored if candidate.costs is not None]
    ranks = non_dominated_ranks(costs)
    fronts: dict[int, list[int]] = {}
    for i, rank in enumerate(ranks):
        fronts.setdefault(rank, []).append(i)
    infeasible = (c for c in candidates if c.costs is not None and c.violation > 0)
    keys: dict[int, tuple[float, float]] = {c.number: (len(candidates), c.violation) for c in infeasible}
    for rank, front in fronts.items():
        for i, distance in zip(front, crowding_distances([costs[i] for i in front]), strict=True):
            keys[scored[i].number] = (rank, -distance)
    last = (math.inf, math.inf)
    return tuple(sorted((c.number for c in candidates), key=lambda number: (keys.get(number, last), number)))


def hypervolume(costs: Sequence[Costs], reference: float = REFERENCE_COST) -> float:
    """Volume of the part of cost space that `costs` dominate, up to a reference point; larger is better.

    The reference point has the cost `reference` in every objective. Points beyond it add nothing. The volume is exact,
    for at most 31 objectives. `costs` has the costs of each point, one for each objective; smaller is better.
    """
    import moocore

    return float(moocore.hypervolume(np.array(costs), ref=[reference] * len(costs[0]))) if costs else 0.0
