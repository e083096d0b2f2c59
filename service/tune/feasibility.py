"""The constraints of a study while its search runs: whether trials satisfy them, rung by rung.

For a bound relative to a source model, trial and source are compared on the samples of the rung. The source's values at
every rung are known once the source has been scored in full. No trial is proposed before that, so that no decision
depends on the order of results.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from search_spaces.constraints import BEST_EXPERT, EXPERT, Constraint
from search_spaces.objectives import Objective
from service.errors import StudyFailed
from service.results.feasibility import Values, excesses, reference_of, total_violation
from service.types import Origin, TrialRecord, TrialState

__all__ = ["Feasibility"]


class Feasibility:
    """The constraints of a study, and by how much each trial violates them at each rung.

    A rung is a number of samples at which trials are compared. `objectives` have the constraints. `trials` contains all
    trials, keyed by number; the caller updates it while the search runs.
    """

    def __init__(self, objectives: Sequence[Objective], trials: Mapping[int, TrialRecord]) -> None:
        self._objectives = objectives
        self._trials = trials
        self._at_looks: dict[int, Mapping[int, Values]] = {}
        self._violations: dict[tuple[int, int], float] = {}
        self._is_known = False

    def know(self, number: int, values: Mapping[int, Values]) -> None:
        """Record objective values of trial `number` at rungs where it was not evaluated itself.

        A rung is a number of samples at which trials are compared. Baselines are evaluated only at the last rung; their
        values on the fewer samples of a lower rung are recorded here. `values` contains the objective values, keyed by
        the index of the rung.
        """
        self._at_looks[number] = dict(values)

    def is_known(self) -> bool:
        """Whether all source models to which the constraints' bounds refer have been scored.

        A bound may be relative to the value of a source model; until this model has been scored, violations cannot be
        computed. Raises StudyFailed if one of these source models has failed.
        """
        relative = [c for o in self._objectives for c in o.constraints if c.reference is not None]
        self._is_known = self._is_known or all(map(self._is_scored, relative))
        return self._is_known

    def values(self, number: int, rung: int) -> tuple[float, ...]:
        """Amount by which trial `number` violates each constraint at a rung.

        A rung is a number of samples at which trials are compared; `rung` is its index. Each amount is a share of its
        objective's range, and at most 0 if the constraint holds. The amounts are in the order of the objectives and
        their constraints. The trial must have a result at the rung.
        """
        found = self._excesses(number, rung)
        widths = {objective.name: objective.bounds[1] - objective.bounds[0] for objective in self._objectives}
        return tuple(excess / widths[constraint.objective] for constraint, excess in found.items())

    def violation(self, number: int, rung: int) -> float:
        """Total violation of constraints by trial `number` at a rung; 0 if all constraints hold.

        A rung is a number of samples at which trials are compared; `rung` is its index. The trial must have a result at
        the rung.
        """
        if not any(objective.constraints for objective in self._objectives):
            return 0.0
        if (number, rung) not in self._violations:
            self._violations[number, rung] = total_violation(self._excesses(number, rung), self._objectives)
        return self._violations[number, rung]

    def _excesses(self, number: int, rung: int) -> dict[Constraint, float]:
        def reference(constraint: Constraint, _: Objective) -> Values | None:
            source = self._references.get(constraint)
            return None if source is None else self._values(source, rung)

        return excesses(self._values(number, rung), self._objectives, reference)

    def _values(self, number: int, rung: int) -> Values:
        stored = {record.rung: record.values for record in self._trials[number].rungs}
        return {**self._at_looks.get(number, {}), **stored}[rung]

    @cached_property
    def _references(self) -> dict[Constraint, int]:
        """Trial number of the source model to which each relative constraint refers, keyed by constraint.

        A constraint is relative if it bounds an objective relative to the value of a named source model, or of the best
        expert (the expert with the best value of the objective). Constraints whose bound is a number are left out. All
        source models must be scored before the first read, because the result is cached.
        """
        found = {}
        for objective in self._objectives:
            for constraint in objective.constraints:
                trial = reference_of(constraint, objective, tuple(self._trials.values()))
                if trial is not None:
                    found[constraint] = trial.number
        return found

    def _is_scored(self, constraint: Constraint) -> bool:
        is_any = constraint.reference == BEST_EXPERT
        named = [
            trial
            for trial in self._trials.values()
            if trial.origin is Origin.SOURCE
            and (trial.label.startswith(EXPERT) if is_any else trial.label == constraint.reference)
        ]
        if not all(trial.state.is_finished for trial in named):
            return False
        if not any(trial.state is TrialState.COMPLETE for trial in named):
            reason = next((trial.reason for trial in named if trial.reason), "no such source model was scored")
            raise StudyFailed(f"search.constraints: {constraint.text}: {constraint.reference} has no score: {reason}")
        return True
