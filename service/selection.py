"""Which trials count as results: the front, the best, and the finalists of the held-out stage.

Only trials evaluated at the full budget take part, sources and published recipes included. Holdout data never
select anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from search_spaces.objectives import Candidate, Objective, non_dominated_ranks, promotion_order
from service.types import Origin, TrialRecord, TrialState

__all__ = ["MAX_FINALISTS", "best", "costs", "finalists", "front", "held_out"]

MAX_FINALISTS = 8


def costs(trial: TrialRecord, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """The trial's cost per objective at its last rung; smaller is better."""
    values = trial.rungs[-1].values
    return tuple(objective.cost(values[objective.name]) for objective in objectives)


def complete(trials: Sequence[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Trials evaluated at the full budget, one per recipe: the one with the lowest number."""
    seen: dict[str, TrialRecord] = {}
    for trial in sorted(trials, key=lambda trial: trial.number):
        if trial.state is TrialState.COMPLETE:
            seen.setdefault(trial.recipe.digest, trial)
    return tuple(seen.values())


def front(trials: Sequence[TrialRecord], objectives: Sequence[Objective]) -> tuple[TrialRecord, ...]:
    """The complete trials that no other one dominates, in order of number."""
    candidates = complete(trials)
    ranks = non_dominated_ranks([costs(trial, objectives) for trial in candidates])
    return tuple(trial for trial, rank in zip(candidates, ranks, strict=True) if rank == 0)


def best(trials: Sequence[TrialRecord], objectives: Sequence[Objective]) -> TrialRecord | None:
    """The complete trial with the lowest mean cost (the highest mean accuracy) on search data, None without any."""

    def mean_cost(trial: TrialRecord) -> float:
        return sum(costs(trial, objectives)) / len(objectives)

    return min(complete(trials), key=lambda trial: (mean_cost(trial), trial.number), default=None)


def finalists(trials: Sequence[TrialRecord], objectives: Sequence[Objective]) -> tuple[TrialRecord, ...]:
    """The front, at most MAX_FINALISTS of it (the best always, then by crowding), in order of number."""
    members = {trial.number: trial for trial in front(trials, objectives)}
    if len(members) > MAX_FINALISTS:
        order = promotion_order([Candidate(number, costs(trial, objectives)) for number, trial in members.items()])
        winner = best(trials, objectives)
        assert winner is not None
        kept = [winner.number, *(number for number in order if number != winner.number)][:MAX_FINALISTS]
        members = {number: members[number] for number in sorted(kept)}
    return tuple(members.values())


def held_out(trials: Sequence[TrialRecord], objectives: Sequence[Objective]) -> tuple[TrialRecord, ...]:
    """Who is scored on the holdout data: the finalists, every source and every published recipe."""
    final = {trial.number for trial in finalists(trials, objectives)}
    return tuple(
        trial
        for trial in complete(trials)
        if trial.number in final or trial.origin in (Origin.SOURCE, Origin.PUBLISHED)
    )
