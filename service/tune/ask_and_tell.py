"""Ask-and-tell loop of one study: it asks the searcher for trials, and promotes or prunes them after each rung.

Decisions depend only on the stored trials, so a resumed search makes the same decisions as an uninterrupted one. This
module does not handle engines and chunks: its caller reports when a rung of a trial is complete, and when a trial has
failed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

from search_spaces.errors import InvalidStudy, SearchSpaceError
from search_spaces.recipe import Recipe
from search_spaces.spaces.base import SearchSpace
from service.errors import StudyFailed
from service.store import BracketRecord, EvaluationRequest, JobWriter
from service.store.steps import ChargedRequest
from service.tune.feasibility import Feasibility
from service.tune.plan import Plan
from service.tune.proposing.proposals import Asking, Observations, Proposer
from service.tune.sample_limit import SampleLimit
from service.tune.samples.sample_cache import SampleCache
from service.tune.schedulers import rung_table
from service.tune.schedulers.base import Decision, Proposal
from service.tune.trials import Trials
from service.types import EventKind, Origin, StoredRecipe, TrialRecord, TrialState
from workers.types import Split

__all__ = ["AskAndTell"]


class AskAndTell:
    """Ask-and-tell loop of one study: the searcher proposes trials, and the scheduler promotes or prunes them.

    - `plan`, `space`: the study's settings, and its search space
    - `trials`: the trials of the study, to which the loop adds the proposed ones
    - `brackets`: the brackets (ladders of rungs, as in Hyperband) that were stored before the driver started; a rung is
      a number of samples at which trials are compared
    - `samples`: the scored samples, from which the values of trials are computed
    - `writer`: stores results in the database
    - `proposer`: asks the searcher for proposals
    - `observer`: called by the loop with a word for the event that has just happened or follows next ("ask", "rung",
      "promotion"), so that tests can stop the process at this event
    - `is_out_of_budget`: called before a new trial starts; returns the study's limit that is exhausted as a text, or
      None
    - `num_charged`: the number of samples that the searcher's stored computations, such as gradients, take from the
      study's limit of samples
    - `num_steps`: the number of stored gradient steps and policy updates
    - `told_reason`: the last stored reason why the search ended; None if it has not ended before

    From the brackets and the stored trials, the constructor computes again all decisions on which trials are promoted.
    If a crash prevented an earlier driver from storing a decision, the constructor stores it.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        space: SearchSpace,
        trials: Trials,
        brackets: Iterable[BracketRecord],
        samples: SampleCache,
        writer: JobWriter,
        proposer: Proposer,
        observer: Callable[[str], None],
        is_out_of_budget: Callable[[], str | None],
        num_charged: int,
        num_steps: int,
        told_reason: str | None = None,
    ) -> None:
        self.end_reason: str | None = None
        self._told_reason = told_reason
        self._stop_reason: str | None = None
        self._plan = plan
        self._space = space
        self._trials = trials
        self._samples = samples
        self._writer = writer
        self._observer = observer
        self._is_out_of_budget = is_out_of_budget
        # A study that an earlier version began keeps the format of its recipes.
        self._keeps_equal = any(trial.recipe.keeps_equal for trial in trials.values())
        self._asking = Asking(proposer, writer, may_compute=self._may_compute, num_steps=num_steps)
        self._feasibility = Feasibility(plan.objectives, trials)
        self._observations = Observations(space, plan, self._feasibility)
        differences = samples.differences_of(trials)
        self.table = rung_table(plan, violation=self._feasibility.violation, differences=differences)
        self._limit = SampleLimit(plan, table=self.table, samples=samples, num_charged=num_charged)
        self._replay(tuple(brackets))

    @property
    def num_samples_used(self) -> int:
        return self._limit.num_used

    @property
    def num_steps(self) -> int:
        """The number of gradient steps and policy updates that the searcher has made since the study began."""
        return self._asking.num_steps

    # -- evaluations -----------------------------------------------------------------------------------------------

    def ready(self) -> list[tuple[int, int]]:
        """The evaluations that may run now, each as (trial number, rung), in the order of starting.

        A rung is a number of samples at which trials are compared; here it is given as its index from 0.
        """
        return list(self.table.ready())

    def finish(self, number: int, rung: int) -> None:
        """Record the result of trial `number` at a rung, and promote or prune trials as far as the known results allow.

        All samples of the rung must be stored. The trial fails if a value is outside the range of its objective. A rung
        is a number of samples at which trials are compared, given by its index.
        """
        record = self._samples.rung_record(self._trials[number].recipe, rung)
        try:
            costs = self._plan.costs(record.values)
        except InvalidStudy as error:
            self.fail(number, str(error))
            return
        self._trials.finish_rung(number, record, is_last=rung == self.table.last_rung)
        self._observer("rung")
        self._know_lower_rungs(self._trials[number])
        self._apply(self.table.record(number, rung, costs))
        if self._stop_reason is not None and rung != self.table.last_rung:
            self._trials.finish([number], TrialState.PRUNED, self._stop_reason)

    def fail(self, number: int, reason: str) -> None:
        """Mark trial `number` as failed for `reason`, and promote or prune the trials that waited for its result."""
        self._trials.finish([number], TrialState.FAIL, reason)
        self._apply(self.table.fail(number))

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            pruned = [n for n in decision.pruned if not self._trials[n].state.is_finished]
            if pruned:
                self._observer("promotion")
                reason = decision.reason or f"not promoted from rung {decision.rung}"
                self._trials.finish(pruned, TrialState.PRUNED, reason, rival=decision.rival)

    def _know_lower_rungs(self, trial: TrialRecord) -> None:
        """Record a baseline's objective values at the rungs below the last, for comparisons with other trials.

        A rung is a number of samples at which trials are compared. A baseline is scored only once, on all samples of
        the last rung. The samples of a lower rung are a part of these samples, and the values at the lower rung are
        computed from this part. The method does nothing for a trial that is no baseline, and for a baseline that is not
        scored yet.
        """
        if trial.bracket is None and trial.state is TrialState.COMPLETE:
            records = (self._samples.rung_record(trial.recipe, rung) for rung in range(self.table.last_rung))
            lower = {record.rung: record.values for record in records}
            self.table.know(trial.number, {rung: self._plan.costs(values) for rung, values in lower.items()})
            self._feasibility.know(trial.number, lower)

    def stop(self, reason: str, *, running: Collection[int]) -> None:
        """End the search now; all trials that are not in `running` end as pruned.

        `reason` is stored as the reason why the trials were pruned, and why the search ended. `running` has the numbers
        of the trials that are being evaluated. Each of these trials ends with its next result.
        """
        if not self.table.is_finished:
            self.end_reason = reason
        self._stop_reason = reason
        self.table.stop(running=running)
        ended = [t.number for t in self._trials.values() if not t.state.is_finished and t.number not in running]
        if ended:
            self._trials.finish(ended, TrialState.PRUNED, reason)

    def add_requested(self, requests: Iterable[EvaluationRequest]) -> None:
        """Add a trial for each user's request to evaluate a merge, unless the request already has a trial.

        A request names an existing trial, whose merge is evaluated, or has a merge itself, as a recipe or a
        configuration. The new trial is scored on all search samples. Like a baseline, it belongs to no bracket (ladder
        of rungs). The new trial takes the next trial number and is stored with it, so that a resumed search gives its
        proposals the same numbers.
        """
        for request in requests:
            if request.added is None:
                trial = self._requested(request)
                self._trials.add(trial, request=request.number)
                self._enter(trial)

    def _requested(self, request: EvaluationRequest) -> TrialRecord:
        """Make the trial, with the next free number, that evaluates the merge of a user's request."""
        label, configuration = request.label or "", request.configuration
        recipe: Recipe | StoredRecipe
        if request.trial is not None:
            source = self._trials[request.trial]
            label, configuration, recipe = (
                f"trial {source.number} at the full budget",
                source.configuration,
                source.recipe,
            )
        elif request.recipe is not None:
            recipe = Recipe.from_json(request.recipe)
        else:
            configuration, recipe = self._merge_of(configuration or {})
        number = len(self._trials)
        return TrialRecord(number, Origin.USER, label, TrialState.WAITING, recipe, configuration=configuration)

    # -- the refinement after the search ---------------------------------------------------------------------------

    def end_search(self) -> None:
        """Stop proposing trials, because the study now refines the coefficients of the Pareto front's trials."""
        self.table.end_search()

    def add(self, trial: TrialRecord) -> None:
        """Add a trial that the searcher did not propose; it is evaluated once, on all samples of the search."""
        self._add(trial)

    def admits_refinement(self, num_samples: int) -> bool | None:
        """Whether the study's limit of samples allows the refinement of one trial, which takes `num_samples` samples.

        The refinement is a gradient descent on the trial's coefficients, after the search. The result is None as long
        as the answer depends on running evaluations, which may still use up the limit.
        """
        return self._limit.admits_refinement(num_samples)

    def charge(self, num_samples: int) -> None:
        """Count `num_samples` more samples against the study's limit, for losses or a gradient of the refinement.

        The refinement is a gradient descent on the coefficients of the Pareto front's trials, after the search.
        """
        self._limit.num_charged += num_samples

    # -- proposals -------------------------------------------------------------------------------------------------

    def ask(self, *, timeout_s: float) -> bool:
        """Request the searcher's next configuration, and add the configuration as a trial once it is ready.

        The method waits up to `timeout_s` seconds. If the configuration is not ready by then, the next call continues
        to wait for it. Returns True if a trial was added.
        """
        if self.table.is_search_over or not self._feasibility.is_known():
            return False
        if self._asking.proposal is None:
            self._check_limits()
            proposal = self.table.proposal()
            if proposal is None or not self._may_start(proposal):
                return False
            self._observer("ask")
            self._asking.submit(
                proposal,
                self._observations.of(proposal, self._trials),
                tuple(c for n in proposal.pending if (c := self._trials[n].configuration) is not None),
            )
        found = self._asking.result(timeout_s=timeout_s)
        if found is None:
            return False
        self._propose(*found)
        return True

    def _propose(self, proposal: Proposal, configuration: Mapping[str, Any], ask_s: float) -> None:
        number = proposal.number
        try:
            configuration, recipe = self._merge_of(configuration)
        except SearchSpaceError as error:
            raise StudyFailed(f"trial {number}: the searcher left the search space: {error}") from error
        if proposal.opens is not None:
            first_rung, size = proposal.opens.first_rung, proposal.opens.num_configurations
            self._writer.open_bracket(BracketRecord(proposal.bracket, first_rung, size))
            self.table.open_bracket(proposal.bracket, first_rung=first_rung, size=size)
        self._add(
            TrialRecord(
                number=number,
                origin=Origin.SEARCH,
                label=f"trial {number}",
                state=TrialState.WAITING,
                recipe=recipe,
                configuration=configuration,
                bracket=proposal.bracket,
                timings_s={"ask": ask_s},
            )
        )
        self._check_exhausted()
        rung = self.table.next_rung(number)
        if not self._samples.missing(recipe.digest, rung, Split.SEARCH):
            self.finish(number, rung)

    def _merge_of(self, configuration: Mapping[str, Any]) -> tuple[Mapping[str, Any], Recipe]:
        """Convert `configuration` to the form that studies store; return it with the recipe of its merge.

        If several configurations give the same merge, only one of them is stored. Raises SearchSpaceError if the
        configuration is outside of the search space.
        """
        self._space.parameters.check(configuration)
        repaired = self._space.parameters.repair(configuration)
        return repaired, replace(self._space.to_recipe(repaired), keeps_equal=self._keeps_equal)

    def _may_start(self, proposal: Proposal, *, num_charged: int = 0) -> bool:
        """Whether the study's limit of samples allows the trial of `proposal`, or a computation for it, to start.

        If `num_charged` is above 0, the question is about the computation, such as a gradient, which counts as this
        number of samples. If the limit would be exceeded, this method ends the search and returns False. The method
        also returns False as long as the answer depends on running evaluations.
        """
        fits = self._limit.admits(proposal, num_charged=num_charged)
        if fits is False:
            self._end(self._limit.reason(proposal, num_charged=num_charged))
        return bool(fits)

    def _may_compute(self, proposal: Proposal, request: ChargedRequest) -> bool:
        may_start = self._may_start(proposal, num_charged=request.num_charged)
        if may_start:
            self._limit.num_charged += request.num_charged
        return may_start

    def _check_exhausted(self) -> None:
        most = self._plan.max_duplicates
        if self._trials.num_duplicates_in_a_row() >= most:
            self._end(f"the last {most} proposals were recipes scored already: the space is exhausted")

    def _check_limits(self) -> None:
        if (reason := self._is_out_of_budget()) is not None:
            self._end(reason)

    def _end(self, reason: str) -> None:
        self.end_reason = reason
        if reason != self._told_reason:  # a study that continues may end for the same reason again
            self._writer.add_event(EventKind.SEARCH_ENDED, {"reason": reason})
            self._told_reason = reason
        for bracket in self.table.end_search():
            self._writer.resize_bracket(bracket, self.table.size(bracket))
            self._apply(self.table.decide(bracket))

    # -- starting and resuming -------------------------------------------------------------------------------------

    def _replay(self, brackets: tuple[BracketRecord, ...]) -> None:
        """Rebuild the scheduler's state from the stored `brackets` and trials.

        A bracket is a ladder of rungs, and a rung is a number of samples at which trials are compared. Baselines that
        are not stored yet are added as trials. Decisions on promotion that were not stored because of a crash are
        stored now.
        """
        for bracket in brackets:
            self.table.open_bracket(bracket.bracket, first_rung=bracket.first_rung, size=bracket.size)
        for trial in self._trials.values():
            self._enter(trial)
        for index in self.table.shrink():
            self._writer.resize_bracket(index, self.table.size(index))
        for number, (origin, label, recipe) in enumerate(self._plan.baselines):
            if number not in self._trials:
                self._add(TrialRecord(number, origin, label, TrialState.WAITING, recipe))
        first_rungs = {bracket.bracket: bracket.first_rung for bracket in brackets}
        decisions: list[Decision] = []
        for rung in range(len(self._plan.rung_samples)):
            for trial in self._trials.values():
                stored = [record for record in trial.rungs if record.rung == rung]
                if stored:
                    decisions += self.table.record(trial.number, rung, self._plan.costs(stored[0].values))
                elif trial.state is TrialState.FAIL and rung == self._rung_of_failure(trial, first_rungs):
                    decisions += self.table.fail(trial.number)
        self._apply(decisions)
        self._check_exhausted()

    def _rung_of_failure(self, trial: TrialRecord, first_rungs: Mapping[int, int]) -> int:
        if trial.rungs:
            return trial.rungs[-1].rung + 1
        return self.table.last_rung if trial.bracket is None else first_rungs[trial.bracket]

    def _add(self, trial: TrialRecord) -> None:
        self._trials.add(trial)
        self._enter(trial)

    def _enter(self, trial: TrialRecord) -> None:
        self.table.add_trial(trial.number, trial.bracket)
        self._know_lower_rungs(trial)
