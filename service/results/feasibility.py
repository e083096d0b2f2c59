"""Violations of the constraints on a study's objectives.

A bound may be relative to a source model's value. This value is then computed on the same samples as the value of the
trial that must keep to the bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from search_spaces.constraints import BEST_EXPERT, EXPERT, Constraint
from search_spaces.objectives import Objective
from service.schemas.files import ConstraintDocument
from service.types import Origin, TrialResult

__all__ = [
    "Values",
    "constraint_documents",
    "excesses",
    "has_constraints",
    "reference_of",
    "sources_of",
    "total_violation",
    "violations",
]

Values = Mapping[str, float]


def has_constraints(objectives: Sequence[Objective]) -> bool:
    """Whether at least one of the objectives is constrained."""
    return any(objective.constraints for objective in objectives)


def sources_of(trials: Iterable[TrialResult]) -> tuple[TrialResult, ...]:
    """Select the trials of the source models: the base model and the experts."""
    return tuple(trial for trial in trials if trial.origin is Origin.SOURCE)


def reference_of(constraint: Constraint, objective: Objective, trials: Sequence[TrialResult]) -> TrialResult | None:
    """Find the trial of the source model that a constraint's bound refers to.

    The bound may be relative to the best expert. The best expert is the expert with the best value of the objective;
    among experts with equal values, the first expert is chosen.

    Args:
        constraint: A constraint of `objective`.
        objective: The constrained objective.
        trials: Trials that were scored on all samples of the search.

    Returns:
        The trial, or None if the bound is a number or the model is not among `trials`.
    """
    scored = [t for t in trials if t.origin is Origin.SOURCE and objective.name in t.values]
    if constraint.reference == BEST_EXPERT:
        experts = [trial for trial in scored if trial.label.startswith(EXPERT)]
        cost = {trial.number: objective.cost_of_stored(trial.values[objective.name]) for trial in experts}
        return min(experts, key=lambda trial: (cost[trial.number], trial.number), default=None)
    return next((trial for trial in scored if trial.label == constraint.reference), None)


def excesses(
    values: Values, objectives: Sequence[Objective], reference: Callable[[Constraint, Objective], Values | None]
) -> dict[Constraint, float]:
    """Compute the excess of each constraint: how far the value is beyond its bound, in the metric's unit.

    A constraint holds if its excess is at most 0. The bound may be a lower or an upper limit.

    Args:
        values: Values, keyed by objective.
        objectives: Objectives with their constraints.
        reference: Returns the values, on the same samples, of the source model to which a constraint's bound is
            relative. If it returns None, the constraint is left out.
    """
    found = {}
    for objective in objectives:
        for constraint in objective.constraints:
            known = reference(constraint, objective) if constraint.reference is not None else {objective.name: 0.0}
            if known is not None and objective.name in known and objective.name in values:
                found[constraint] = constraint.excess(values[objective.name], known[objective.name])
    return found


def violations(
    values: Values,
    objectives: Sequence[Objective],
    trials: Sequence[TrialResult],
    *,
    values_of: Callable[[TrialResult], Values] = lambda trial: trial.values,
) -> dict[str, float]:
    """List the violated constraints, each with its excess: how far the value is beyond the bound, in the metric's unit.

    The result is keyed by the constraint's text. A bound may be relative to the value of a source model.

    Args:
        values: Values, keyed by objective.
        objectives: Objectives with their constraints.
        trials: Trials of the study, or at least the trials of its source models.
        values_of: Returns the values of a source model that bounds are relative to. The returned values must be on the
            same samples as `values`; by default they are the values on all samples of the search.
    """
    if not has_constraints(objectives):
        return {}

    def reference(constraint: Constraint, objective: Objective) -> Values | None:
        found = reference_of(constraint, objective, trials)
        return None if found is None else values_of(found)

    return {c.text: excess for c, excess in excesses(values, objectives, reference).items() if excess > 0}


def constraint_documents(
    objectives: Sequence[Objective], trials: Sequence[TrialResult], sources: Sequence[TrialResult]
) -> list[ConstraintDocument]:
    """Describe each constraint as JSON, with its bound and the number of trials that satisfy it.

    Args:
        objectives: Objectives with their constraints.
        trials: Trials that were scored on all samples of the search.
        sources: Scored trials of the source models, to which bounds may be relative, also those marked as invalid.
    """
    documents: list[ConstraintDocument] = []
    for objective in objectives:
        for constraint in objective.constraints:
            source = reference_of(constraint, objective, sources)
            is_known = constraint.reference is None or source is not None
            bound = constraint.offset + (0.0 if source is None else source.values[objective.name])
            kept = [t for t in trials if constraint.text not in violations(t.values, [objective], sources)]
            documents.append(
                {
                    "constraint": constraint.text,
                    "bound": bound if is_known else None,
                    "kept_by": len(kept) if is_known else 0,
                    "trials": len(trials),
                }
            )
    return documents


def total_violation(excess: Mapping[Constraint, float], objectives: Sequence[Objective]) -> float:
    """Sum of the violations of all constraints, each divided by the width of its objective's range.

    `excess` has, for each constraint, how far the value is beyond the bound; at most 0 if the constraint holds. The sum
    is 0 if all constraints hold.
    """
    widths = {objective.name: objective.bounds[1] - objective.bounds[0] for objective in objectives}
    return sum(max(0.0, value) / widths[constraint.objective] for constraint, value in excess.items())
