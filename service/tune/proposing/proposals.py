"""Proposals as the driver sees them: what they may know, who computes them, and how their steps are stored."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from search_spaces.spaces.base import SearchSpace
from service.store import JobWriter
from service.store.steps import NoteStep, Step
from service.tune.feasibility import Feasibility
from service.tune.plan import Plan
from service.tune.schedulers.base import Proposal
from service.tune.searchers.base import Observation
from service.types import EventKind, Origin, TrialRecord

__all__ = ["Asking", "Observations", "Proposer"]


class Proposer(Protocol):
    """Computes proposals while the driver works."""

    def submit(self, *, number: int, observations: Sequence[Observation], pending: Sequence[Mapping[str, Any]]) -> None:
        """Start computing proposal `number`."""
        ...

    def result(self, *, timeout_s: float) -> Step | dict[str, Any] | None:
        """The submitted proposal's configuration, or a step that was computed for it; None if neither is ready.

        After a step, the computation continues when `stored` is called.
        """
        ...

    def stored(self, step: Step) -> None:
        """Continue the proposal after `step`, which has been stored."""
        ...


class Asking:
    """The proposal that the searcher is computing, if any."""

    def __init__(self, proposer: Proposer, writer: JobWriter) -> None:
        self._proposer = proposer
        self._writer = writer
        self._asked_at = 0.0
        self.proposal: Proposal | None = None

    def submit(self, proposal: Proposal, found: Sequence[Observation], pending: Sequence[Mapping[str, Any]]) -> None:
        self.proposal, self._asked_at = proposal, time.monotonic()
        self._proposer.submit(number=proposal.number, observations=found, pending=pending)

    def result(self, *, timeout_s: float) -> tuple[Proposal, dict[str, Any], float] | None:
        """The proposal, its configuration and the seconds it took; None if it is not ready within `timeout_s`.

        Steps that are ready are stored. Raises StaleAttempt.
        """
        assert self.proposal is not None
        deadline = time.monotonic() + timeout_s
        answer = self._proposer.result(timeout_s=timeout_s)
        while answer is not None and not isinstance(answer, dict):
            self._store(answer)
            self._proposer.stored(answer)
            answer = self._proposer.result(timeout_s=max(0.0, deadline - time.monotonic()))
        if answer is None:
            return None
        proposal, self.proposal = self.proposal, None
        return proposal, answer, time.monotonic() - self._asked_at

    def _store(self, step: Step) -> None:
        self._writer.add_step(step)
        if isinstance(step, NoteStep):
            self._writer.add_event(EventKind.SEARCH_NOTE, {"trial": step.proposal, "text": step.request.label})


class Observations:
    """Builds the observations of a proposal from the stored trials."""

    def __init__(self, space: SearchSpace, plan: Plan, feasibility: Feasibility) -> None:
        self._space = space
        self._plan = plan
        self._feasibility = feasibility
        self._full = sum(plan.rung_samples[-1].values())
        self._baselines: dict[int, Mapping[str, Any] | None] = {}
        self._built: dict[tuple[int, int], Observation | None] = {}

    def of(self, proposal: Proposal, trials: Mapping[int, TrialRecord]) -> tuple[Observation, ...]:
        """The observations that a proposal may know, without trials that the space cannot express."""
        for seen in proposal.visible:
            if seen not in self._built:
                self._built[seen] = self._of_rung(trials[seen[0]], seen[1])
        found = [built for seen in proposal.visible if (built := self._built[seen]) is not None]
        for number in proposal.failed:
            if (configuration := trials[number].configuration) is not None:
                last = len(self._plan.rung_samples) - 1
                found.append(Observation(configuration, 1.0, None, number=number, rung=last))
        return tuple(found)

    def _of_rung(self, trial: TrialRecord, rung: int) -> Observation | None:
        """The observation of a trial at a rung, whose result does not change; None if the space cannot express it."""
        configuration = trial.configuration or self._of_baseline(trial)
        if configuration is None:
            return None
        plan = self._plan
        record = next(record for record in trial.rungs if record.rung == rung)
        return Observation(
            configuration,
            sum(plan.rung_samples[rung].values()) / self._full,
            plan.costs(record.values),
            number=trial.number,
            rung=rung,
            standard_errors=plan.cost_errors(record.standard_errors),
            constraints=self._feasibility.values(trial.number, rung),
            is_proposed=trial.origin is Origin.SEARCH,
        )

    def _of_baseline(self, trial: TrialRecord) -> Mapping[str, Any] | None:
        """The configuration of a baseline, None if the space cannot express it; computed once."""
        if trial.number not in self._baselines:
            self._baselines[trial.number] = self._space.from_recipe(replace(trial.recipe, keeps_equal=False))
        return self._baselines[trial.number]
