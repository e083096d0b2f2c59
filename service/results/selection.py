"""Selection of trials: the best trial, the Pareto front, and the finalists for holdout data.

Only trials evaluated at the full budget are considered, baselines included. Trials that satisfy all constraints come
before trials that violate constraints, whatever their values. Holdout data never select anything.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from search_spaces.constraints import Constraint
from search_spaces.objectives import Candidate, Costs, Objective, constrained_front
from search_spaces.study.benchmarks import TrialChoice
from service.results.feasibility import Values, excesses, has_constraints, reference_of, total_violation
from service.types import Origin, TrialResult, TrialState

__all__ = [
    "Criteria",
    "accuracy_objectives",
    "best_of_front",
    "best_trial",
    "candidates",
    "chosen_trials",
    "compared_with",
    "costs_of",
    "costs_of_values",
    "criteria",
    "finalists",
    "front_of",
    "full_budget_trials",
    "held_out",
    "pareto_front",
    "ranked_trials",
]

MAX_FINALISTS = 8

# Selected trials are of the type that they are selected from.
Trial = TypeVar("Trial", bound=TrialResult)


def accuracy_objectives(objectives: Sequence[Objective]) -> tuple[str, ...]:
    """Names of the accuracy objectives: those with values in [0, 1] for which larger is better.

    Only for these objectives is a plain mean meaningful.
    """
    return tuple(o.name for o in objectives if o.direction == "maximize" and o.range in (None, (0.0, 1.0)))


@dataclass(frozen=True)
class Criteria:
    """Texts that describe how a study selects trials.

    `best` describes which trial is best. `promotion` describes which trials are promoted to the next rung (a larger
    number of samples). `difference` says why the two choices can differ.
    """

    best: str
    promotion: str
    difference: str


def criteria(objectives: Sequence[Objective]) -> Criteria:
    """Describe in texts how a study with these objectives selects its best trial and the trials that are promoted."""
    names = accuracy_objectives(objectives)
    if len(objectives) == 1:
        best = promotion = f"{'highest' if objectives[0].direction == 'maximize' else 'lowest'} {objectives[0].name}"
        why = "both compare the same value, but a promotion compares it on the fewer samples of its rung"
    else:
        scored = [objective.name for objective in objectives if objective.cost_of_recipe is None]
        every = "all objectives" if len(scored) == len(objectives) else ", ".join(scored)
        best = f"highest mean of {', '.join(names)}" if names else f"lowest mean cost over {every}"
        promotion = (
            f"non-dominated rank in {', '.join(objective.name for objective in objectives)}, then the least crowded "
            "(crowding distance), then the lower trial number"
        )
        why = (
            "promotion keeps every trade-off between the objectives alive, the best of one of them included, so a "
            "promoted trial need not have the highest mean, and a trial with a higher mean may not be promoted"
        )
    if has_constraints(objectives):
        kept = ", ".join(constraint.text for objective in objectives for constraint in objective.constraints)
        best += f", of trials that keep to {kept}"
        promotion = f"trials that keep to {kept} first, by {promotion}; then the others, the least violation first"
    return Criteria(best=f"{best} on search data, among trials at full budget", promotion=promotion, difference=why)


def full_budget_trials(trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Select the trials that were scored on all samples of the search, baselines included.

    Trials that a user has marked as invalid are left out.
    """
    is_full = TrialState.COMPLETE
    return tuple(trial for trial in trials if trial.state is is_full and trial.values and trial.invalid is None)


def best_trial(trials: Iterable[Trial], objectives: Sequence[Objective]) -> Trial | None:
    """Select the best of the trials that were scored on all samples of the search data.

    The best trial is the trial with the highest mean of the accuracy objectives (values in [0, 1], larger is better).
    If the study has no accuracy objectives, the best trial is the trial with the lowest mean cost. An objective's cost
    is its value scaled to [0, 1], where 0 is the best value. Objectives that need no samples, such as the number of
    parameters, do not count. If trials are equal, the one with the lowest mean cost over all objectives is chosen, so
    that no other trial dominates the best one, and then the first one. If no trial satisfies all constraints, the trial
    that violates them least is chosen.

    Returns:
        The best trial; None before a trial has been scored on all samples of the search.
    """
    return next(iter(ranked_trials(trials, objectives)), None)


def ranked_trials(trials: Iterable[Trial], objectives: Sequence[Objective]) -> tuple[Trial, ...]:
    """Sort the trials that were scored on all samples of the search by `objectives`, the best first.

    Trials that satisfy all constraints come first. Trials that violate constraints follow, sorted by their total
    violation. Trials with equal violation are sorted by the mean of the accuracy objectives (values in [0, 1], larger
    is better) or, without these, by the mean cost. Equal trials are sorted by the mean cost over all objectives, then
    by number.
    """
    trials = tuple(trials)
    violation = _violations(trials, objectives)
    merit = _rank(objectives)
    return tuple(sorted(full_budget_trials(trials), key=lambda trial: (violation[trial.number], *merit(trial))))


def finalists(trials: Iterable[Trial], objectives: Sequence[Objective]) -> tuple[Trial, ...]:
    """Select the trials to score on holdout data: trials of the Pareto front, best first, at most MAX_FINALISTS.

    The front consists of the `trials` that no other trial dominates in the `objectives`. The best trial is the first.
    """
    front = front_of(candidates(trials, objectives))
    return tuple(sorted(front, key=_rank(objectives))[:MAX_FINALISTS])


def best_of_front(
    trials: Iterable[Trial], objectives: Sequence[Objective], *, most: int, origin: Origin | None = None
) -> tuple[Trial, ...]:
    """Select at most `most` trials of the Pareto front: the trials with the smallest mean cost, in ascending order.

    Only `trials` that were scored on all samples of the search can be on the front. If `origin` is given, the front is
    selected from the trials with this origin alone. An origin is, for example, a source model, a published recipe or a
    proposal of the search. Trials of other origins then only serve to check constraints whose bound is relative to the
    value of a source model. Trials with equal costs are in the order of their numbers.
    """
    front = front_of(candidates(trials, objectives, origin=origin))
    return tuple(sorted(front, key=_merit(objectives))[:most])


def pareto_front(trials: Iterable[Trial], objectives: Sequence[Objective]) -> tuple[Trial, ...]:
    """Select the trials at full budget that no other trial dominates in `objectives`, in the order of their numbers.

    The full budget is all samples of the search. If several trials have the same recipe, only the first one counts.
    Only trials that satisfy all constraints can be on the front. If no trial satisfies them all, only the trials that
    violate them least can be on the front.
    """
    return front_of(candidates(trials, objectives))


def front_of(candidates: Sequence[tuple[Trial, Candidate]]) -> tuple[Trial, ...]:
    """Select the trials on the Pareto front of `candidates`, in the given order."""
    on_front = constrained_front([candidate for _, candidate in candidates])
    return tuple(trial for trial, _ in itertools.compress(candidates, on_front))


def candidates(
    trials: Iterable[Trial], objectives: Sequence[Objective], *, origin: Origin | None = None
) -> tuple[tuple[Trial, Candidate], ...]:
    """Collect the trials from which the Pareto front is selected, each with its costs and constraint violation.

    These are the trials that were scored on all samples of the search; if several trials have the same recipe, only the
    first one is collected. The costs are computed from the values of `objectives`. If `origin` is given, only trials
    with this origin, such as the search, are collected; trials of source models then still serve as references for the
    bounds of constraints.
    """
    trials = tuple(trials)
    violation = _violations(trials, objectives)
    first: dict[str, Trial] = {}
    for trial in sorted(full_budget_trials(trials), key=lambda trial: trial.number):
        if origin is not None and trial.origin is not origin:
            continue
        first.setdefault(trial.recipe.digest, trial)
    return tuple((t, Candidate(t.number, costs_of(t, objectives), violation[t.number])) for t in first.values())


def _violations(trials: Sequence[TrialResult], objectives: Sequence[Objective]) -> dict[int, float]:
    """Total violation of the constraints of `objectives` by each trial at full budget; 0 if all constraints hold.

    The result is keyed by trial number. The bound of a constraint may be relative to a source model; the trial of this
    model must be among `trials`. It counts also if a user has marked it as invalid, because the bound would be dropped
    without it.
    """
    full = full_budget_trials(trials)
    if not has_constraints(objectives):
        return dict.fromkeys((trial.number for trial in full), 0.0)
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    references = {c: reference_of(c, o, complete) for o in objectives for c in o.constraints}

    def of(constraint: Constraint, _: Objective) -> Values | None:
        trial = references[constraint]
        return None if trial is None else trial.values

    return {t.number: total_violation(excesses(t.values, objectives, of), objectives) for t in full}


def _rank(objectives: Sequence[Objective]) -> Callable[[TrialResult], tuple[float, float, int]]:
    """Make the sort key (mean cost, mean cost over all objectives, trial number); smaller is better.

    The first mean is that of the function `_merit`. A trial that another one dominates never comes before it.
    """
    merit = _merit(objectives)

    def of(trial: TrialResult) -> tuple[float, float, int]:
        cost, number = merit(trial)
        return cost, round(statistics.fmean(costs_of(trial, objectives)), 12), number

    return of


def _merit(objectives: Sequence[Objective]) -> Callable[[TrialResult], tuple[float, int]]:
    """Make the sort key that ranks trials with equal constraint violations; smaller is better.

    The key is (mean cost, trial number). The mean is over the accuracy objectives (values in [0, 1], larger is better).
    Without accuracy objectives, the mean is over the objectives that are scored on samples. If no objective is scored
    on samples, the mean is over all objectives. The mean is rounded, so that trials whose mean costs differ only by
    rounding errors rank as equal in cost.
    """
    names = accuracy_objectives(objectives)
    ranked = [objective for objective in objectives if objective.name in names]
    ranked = ranked or [objective for objective in objectives if objective.cost_of_recipe is None] or list(objectives)

    def of(trial: TrialResult) -> tuple[float, int]:
        costs = [objective.cost_of_stored(trial.values[objective.name]) for objective in ranked]
        return round(statistics.fmean(costs), 12), trial.number

    return of


def costs_of(trial: TrialResult, objectives: Sequence[Objective]) -> Costs:
    """Normalised costs of a trial that was scored on all samples, one for each objective.

    A cost is 0 at the better end of the objective's range and 1 at the worse end.
    """
    return costs_of_values(trial.values, objectives)


def costs_of_values(values: Mapping[str, float], objectives: Sequence[Objective]) -> Costs:
    """Normalised costs of `values`, one for each objective.

    A cost is 0 at the better end of the objective's range and 1 at the worse end. The cost of a value outside the range
    is below 0 or above 1. The costs are in the order of `objectives`.
    """
    return tuple(objective.cost_of_stored(values[objective.name]) for objective in objectives)


def held_out(trials: Iterable[Trial], objectives: Sequence[Objective]) -> tuple[Trial, ...]:
    """Select the trials that are scored on the holdout data, in the order of their numbers.

    The selected trials are the finalists (the best trials of the Pareto front in `objectives`), every baseline, and the
    trial of every merge that the user gave.
    """
    trials = tuple(trials)  # with those marked as invalid: bounds of constraints may be relative to their values
    return compared_with(finalists(trials, objectives), trials)


def chosen_trials(
    choices: Iterable[TrialChoice], trials: Iterable[Trial], objectives: Sequence[Objective]
) -> tuple[Trial, ...]:
    """Select the trials that a benchmark is scored on, in the order of their numbers.

    A choice is the number of a trial, or one of these words:

    - "finalists": the best trials of the Pareto front in `objectives`
    - "best": the best trial
    - "sources": the trials of the source models
    - "published": the trials of published recipes
    - "recipes": the trials of merges that the user gave

    A trial that is chosen by number need not have been scored on all samples of the search. Trials that failed are left
    out.
    """
    trials = tuple(trial for trial in trials if trial.state is not TrialState.FAIL)
    origins = {"sources": Origin.SOURCE, "published": Origin.PUBLISHED, "recipes": Origin.USER}
    found: dict[int, Trial] = {}
    for choice in choices:
        if choice == "finalists":
            chosen = finalists(trials, objectives)
        elif choice == "best":
            best = best_trial(trials, objectives)
            chosen = () if best is None else (best,)
        elif isinstance(choice, int):
            chosen = tuple(trial for trial in trials if trial.number == choice)
        else:
            chosen = tuple(t for t in full_budget_trials(trials) if t.origin is origins[choice])
        found |= {trial.number: trial for trial in chosen}
    return tuple(found[number] for number in sorted(found))


def compared_with(finalists: Iterable[Trial], trials: Iterable[Trial]) -> tuple[Trial, ...]:
    """Select the trials to compare on holdout data: the finalists, the baselines, and merges given by the user.

    `finalists` are the best trials of the Pareto front. Baselines and merges of the user are selected from `trials`, if
    they were scored on all samples of the search. The result is in the order of the trials' numbers.
    """
    baselines = (t for t in full_budget_trials(trials) if t.origin.is_given)
    by_number = {trial.number: trial for trial in (*finalists, *baselines)}
    return tuple(by_number[number] for number in sorted(by_number))
