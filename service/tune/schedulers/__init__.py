"""Schedulers: they decide when trials are promoted from rung to rung, and which results a proposal may use.

- `base`: base class of schedulers, with the table of rungs and brackets
- `successive_halving`: successive halving, Hyperband, ASHA, and one rung without promotion
- `racing`: comparisons with the best trials on the same samples
- `ranking`: the order of promotion within a rung
- `bound`: whether a trial is behind another trial, with a known error rate
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from search_spaces.fidelity import Scheduler
from service.tune.plan import Plan
from service.tune.schedulers.base import RungTable
from service.tune.schedulers.bound import Bound
from service.tune.schedulers.racing import RacingTable
from service.tune.schedulers.successive_halving import AshaTable, HyperbandTable, SuccessiveHalvingTable

__all__ = ["SCHEDULERS", "rung_table"]

SCHEDULERS: Mapping[Scheduler, type[RungTable]] = {
    "hyperband": HyperbandTable,
    "asha": AshaTable,
    "racing": RacingTable,
    "successive_halving": SuccessiveHalvingTable,
    "none": HyperbandTable,  # with one rung: there is nothing to promote
}


def rung_table(
    plan: Plan,
    *,
    violation: Callable[[int, int], float],
    differences: Callable[[int, int, int], Sequence[NDArray[Any]]],
) -> RungTable:
    """Create the scheduler that `plan` names, still without trials.

    The scheduler decides on which rung (number of samples) each trial is evaluated, and which trials are promoted.
    `violation(trial, rung)` is the total constraint violation of a trial at a rung. `differences(trial, rival, rung)`
    has an array for each objective: on each sample of the rung, the trial's cost minus the cost of the trial `rival`,
    with which it is compared.
    """
    own: dict[str, Any] = {}
    if plan.error_rate is not None:
        populations = tuple(plan.rung_samples[-1].get(objective.name, 1) for objective in plan.objectives)
        own["bound"] = Bound(differences, populations, plan.error_rate)
    return SCHEDULERS[plan.scheduler](
        num_rungs=len(plan.rung_samples),
        eta=plan.eta,
        cycle=plan.cycle,
        num_baselines=len(plan.baselines),
        max_trials=plan.max_trials,
        max_staleness=plan.max_staleness,
        open_brackets=plan.open_brackets,
        batch=plan.batch,
        waits_for_baselines=plan.waits_for_baselines,
        violation=violation,
        version=plan.scheduler_version,
        **own,
    )
