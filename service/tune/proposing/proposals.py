"""The driver's side of proposals: the results that a proposal may use, and the interface that computes proposals."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from search_spaces.spaces.base import SearchSpace
from service.store import JobWriter
from service.store.steps import ChargedRequest, GradientRequest, GradientStep, LossesRequest, NoteStep, Step, UpdateStep
from service.tune.feasibility import Feasibility
from service.tune.plan import Plan
from service.tune.schedulers.base import Proposal
from service.tune.searchers.base import Observation
from service.types import EventKind, Origin, TrialRecord

__all__ = ["Asking", "Observations", "Proposer"]


class Proposer(Protocol):
    """The interface of objects that compute proposals (configurations of new trials) in the background.

    The caller does other work meanwhile, and asks for the result from time to time.
    """

    def submit(self, *, number: int, observations: Sequence[Observation], pending: Sequence[Mapping[str, Any]]) -> None:
        """Begin to compute the proposal of trial `number` in the background.

        `observations` are the results that the proposal may use. `pending` are the configurations of earlier trials
        whose results the proposal may not use.
        """
        ...

    def result(self, *, timeout_s: float) -> Step | ChargedRequest | dict[str, Any] | None:
        """The next result of the computation, or None if no result comes within `timeout_s` seconds.

        - A dict is the proposed configuration, and ends the computation.
        - A Step is a computed step, such as a policy update. The caller stores the step and then calls `stored`.
        - A ChargedRequest asks for losses or a gradient, which count against the limit of samples. If the limit allows
          them, the caller calls `compute`.

        The computation of the proposal continues after `stored` or `compute`.
        """
        ...

    def compute(self, request: ChargedRequest) -> None:
        """Begin to compute, in the background, the losses or the gradient that the searcher has requested."""
        ...

    def stored(self, step: Step) -> None:
        """Continue to compute a proposal, after the caller has stored the record `step` that `result` returned.

        A step is the result of a computation that the searcher needs before it proposes, such as a policy update.
        """
        ...


class Asking:
    """Client of a proposer: it requests one proposal at a time, and stores the computations that proposals need.

    A step is a computation that the searcher needs before it proposes, such as a gradient. `proposer` makes the
    proposals, and `writer` stores the steps. `may_compute` is called with the proposal and the searcher's request for
    losses or a gradient; it says whether the study's limit of samples allows the request. If `may_compute` returns
    False, the request waits: the method `result` returns None, and the next call of `result` calls `may_compute` again.
    `num_steps` is the number of gradient steps and policy updates that were stored before; the attribute `num_steps`
    grows with each further step or update.
    """

    def __init__(
        self,
        proposer: Proposer,
        writer: JobWriter,
        *,
        may_compute: Callable[[Proposal, ChargedRequest], bool],
        num_steps: int = 0,
    ) -> None:
        self._proposer = proposer
        self._writer = writer
        self._may_compute = may_compute
        self._asked_at = 0.0
        self._waiting: ChargedRequest | None = None
        self.proposal: Proposal | None = None
        self.num_steps = num_steps

    def submit(self, proposal: Proposal, found: Sequence[Observation], pending: Sequence[Mapping[str, Any]]) -> None:
        self.proposal, self._asked_at = proposal, time.monotonic()
        self._proposer.submit(number=proposal.number, observations=found, pending=pending)

    def result(self, *, timeout_s: float) -> tuple[Proposal, dict[str, Any], float] | None:
        """The finished proposal, or None if the proposal is not ready within `timeout_s` seconds.

        Returns three values: the proposal, its configuration, and the seconds since the proposal was submitted.
        Computed steps that the searcher returns meanwhile, such as policy updates, are stored. Raises StaleAttempt if
        another driver has replaced this one.
        """
        assert self.proposal is not None
        deadline = time.monotonic() + timeout_s
        answer = self._waiting or self._proposer.result(timeout_s=timeout_s)
        while answer is not None and not isinstance(answer, dict):
            if isinstance(answer, (LossesRequest, GradientRequest)):
                self._waiting = answer
                if not self._may_compute(self.proposal, answer):
                    return None
                self._waiting = None
                self._proposer.compute(answer)
            else:
                self._store(answer)
                self._proposer.stored(answer)
            answer = self._proposer.result(timeout_s=max(0.0, deadline - time.monotonic()))
        if answer is None:
            return None
        proposal, self.proposal = self.proposal, None
        return proposal, answer, time.monotonic() - self._asked_at

    def _store(self, step: Step) -> None:
        self._writer.add_step(step)
        self.num_steps += isinstance(step, (GradientStep, UpdateStep))
        if isinstance(step, NoteStep):
            self._writer.add_event(EventKind.SEARCH_NOTE, {"trial": step.proposal, "text": step.request.label})


class Observations:
    """The observations of a study: its trials' results in the form that searchers receive.

    `space` and `plan` are the study's search space and settings. `feasibility` computes by how much a trial violates
    the study's constraints.
    """

    def __init__(self, space: SearchSpace, plan: Plan, feasibility: Feasibility) -> None:
        self._space = space
        self._plan = plan
        self._feasibility = feasibility
        self._full = sum(plan.rung_samples[-1].values())
        self._baselines: dict[int, Mapping[str, Any] | None] = {}
        self._built: dict[tuple[int, int], Observation | None] = {}
        self._failed: dict[int, Observation] = {}

    def of(self, proposal: Proposal, trials: Mapping[int, TrialRecord]) -> tuple[Observation, ...]:
        """The observations that a searcher may use for a proposal: the visible results, and the failed trials.

        `proposal.visible` and `proposal.failed` list these results and trials. `trials` are the study's trials, keyed
        by number. Trials whose recipe has no configuration in the search space are left out. Every call returns the
        same `Observation` object for the same result, so that each observation is sent to the searcher's process only
        once.
        """
        for seen in proposal.visible:
            if seen not in self._built:
                self._built[seen] = self._of_rung(trials[seen[0]], seen[1])
        found = [built for seen in proposal.visible if (built := self._built[seen]) is not None]
        for number in proposal.failed:
            if number not in self._failed and (configuration := trials[number].configuration) is not None:
                last = len(self._plan.rung_samples) - 1
                self._failed[number] = Observation(configuration, 1.0, None, number=number, rung=last)
        return (*found, *(self._failed[number] for number in proposal.failed if number in self._failed))

    def _of_rung(self, trial: TrialRecord, rung: int) -> Observation | None:
        """The result of a trial at one rung, as searchers receive it; the trial must have a result there.

        A rung is a number of samples at which trials are compared; `rung` is its index. Returns None if the trial is a
        baseline whose recipe has no configuration in the search space.
        """
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
        """The point of the search space that gives the recipe of `trial`, a baseline; None if no point gives it.

        The configuration of each baseline is computed only once.
        """
        if trial.number not in self._baselines:
            self._baselines[trial.number] = self._space.from_recipe(replace(trial.read_recipe(), keeps_equal=False))
        return self._baselines[trial.number]
