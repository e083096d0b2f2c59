"""The coordinator of one study: decides from stored results what to evaluate next, and stores what comes back.

It connects the rung table (promotions), the searcher (proposals), the store, the sample cache and the provenance check.
It does not know Ray: `ray_tune` runs its evaluations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from search_spaces.errors import InvalidStudy, SearchSpaceError
from search_spaces.spaces.base import SearchSpace
from service.errors import StudyFailed
from service.results.ranges import out_of_range
from service.results.selection import held_out
from service.store import BracketRecord, JobWriter, Store
from service.tune.crashes import Crashes
from service.tune.evaluation import ChunkFailed, Evaluation, FailureKind
from service.tune.feasibility import Feasibility
from service.tune.plan import PROPOSALS_AHEAD, Plan
from service.tune.proposing.proposals import Asking, Observations, Proposer, num_duplicates_in_a_row
from service.tune.provenance import ProvenanceCheck
from service.tune.rescoring import Rescoring
from service.tune.sample_cache import SampleCache
from service.tune.schedulers import rung_table
from service.tune.schedulers.base import Decision, Proposal
from service.types import EventKind, Origin, TrialRecord, TrialState
from workers.errors import EngineFault
from workers.types import ScoreResult, Split

__all__ = ["Coordinator"]

logger = logging.getLogger(__name__)

# A trial fails when its actor has died this often: an actor only sends requests, so the trial is the likely cause.
MAX_LOST_ACTORS = 3


class Coordinator:
    """The state of one study's search. Not thread-safe: Tune's controller loop is its only caller.

    `observer` is called with the name of every step ("ask", "chunk", "commit", "rung", "promotion", ...); tests stop
    the process there. `is_out_of_budget` is called before a new trial starts and returns the exhausted limit, or None.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        space: SearchSpace,
        store: Store,
        writer: JobWriter,
        proposer: Proposer,
        observer: Callable[[str], None] = lambda _: None,
        is_out_of_budget: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.plan = plan
        self.end_of_search: str | None = None
        self._space = space
        self._store = store
        self._writer = writer
        self._observer = observer
        self._is_out_of_budget = is_out_of_budget
        self._in_flight: dict[int, Evaluation] = {}
        self._lost_actors: dict[int, int] = {}
        self._crashes = Crashes(store.events(plan.study_id))
        self._asking = Asking(proposer, writer)
        # A study that an earlier version began keeps its recipes' format.
        self._keeps_equal = any(trial.recipe.keeps_equal for trial in store.trials(plan.study_id))
        self.is_holdout_stage = False
        self._holdout: list[int] = []  # trials to be scored on held-out data
        self._trials: dict[int, TrialRecord] = {}
        self._feasibility = Feasibility(plan.objectives, self._trials)
        self._observations = Observations(space, plan, self._feasibility)
        self._digests: dict[str, int] = {}
        self._samples = SampleCache(plan, store)
        evidence = store.evidence(plan.study_id)
        self._provenance = ProvenanceCheck(plan.bank_fingerprint, evidence)
        self._replicas = {row.replica for row in evidence}
        self._rescoring = Rescoring(plan.study_id, store, writer, self._samples)
        differences = self._samples.differences_of(self._trials)
        self.table = rung_table(plan, violation=self._feasibility.violation, differences=differences)
        self._replay()
        self.look_for_faults()

    # -- for the driver --------------------------------------------------------------------------------------------

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """Every trial in its present state, by number."""
        return tuple(self._trials[number] for number in sorted(self._trials))

    @property
    def num_samples_scored(self) -> int:
        """Samples scored in all attempts, for search and holdout."""
        return self._samples.num_scored

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_finished(self) -> bool:
        """True once nothing is left to do."""
        if self._in_flight or self._rescoring.is_pending or not self.table.is_finished:
            return False
        return not self.plan.holdout_samples or (self.is_holdout_stage and not self._holdout)

    def next_evaluation(self, *, timeout_s: float = 0.0) -> Evaluation | None:
        """The next evaluation, or None if there is none until one in flight finishes.

        Waits up to `timeout_s` for the searcher if there is nothing else to do. Void samples come first: nothing new
        starts before they have been scored again."""
        self.look_for_faults(at_once=False)
        if self._rescoring.is_pending:
            in_flight, trial_of = self._in_flight.values(), lambda digest: self._trials[self._digests[digest]]
            found = self._rescoring.next_evaluation(in_flight, trial_of=trial_of)
            return None if found is None else self._started(found)
        while True:
            self._maybe_start_holdout()
            asked = self.ask_ahead()
            busy = {flying.recipe.digest for flying in self._in_flight.values()}
            for number, rung, split in self._ready():
                if self._trials[number].recipe.digest in busy:
                    continue
                evaluation = self._evaluation(self._trials[number], rung, split)
                if evaluation.chunks:
                    return self._started(evaluation)
                self._finish(evaluation)
                break
            else:
                if not asked and (timeout_s == 0 or not self._ask(timeout_s=timeout_s)):
                    return None

    def ask_ahead(self, *, timeout_s: float = 0.0) -> bool:
        """Take proposals, for `timeout_s`, until PROPOSALS_AHEAD proposed trials wait for their first evaluation: then
        engines need not wait for the searcher. Returns True if a trial was added."""
        deadline, num_before = time.monotonic() + timeout_s, len(self._trials)
        while not self._rescoring.is_pending and self._num_unstarted() < PROPOSALS_AHEAD:
            if not self._ask(timeout_s=max(0.0, deadline - time.monotonic())):
                break
        return len(self._trials) > num_before

    def _started(self, evaluation: Evaluation) -> Evaluation:
        self._in_flight[evaluation.trial] = evaluation
        return evaluation

    def on_engine_fault(self, fault: EngineFault) -> None:
        """An engine failed a check: what it scored since its last canary is to be scored again.

        Raises StudyFailed if too many engines did."""
        logger.warning("%s", fault)
        self._rescoring.report(fault)
        self.look_for_faults()

    def look_for_faults(self, *, at_once: bool = True) -> None:
        """Learn which engines failed a check in any study."""
        if self._rescoring.look(at_once=at_once):
            stored = self._store.evidence(self.plan.study_id)
            valid = [row for row in stored if not self._rescoring.is_void(row.replica, row.canaries)]
            self._provenance = ProvenanceCheck(self.plan.bank_fingerprint, valid)

    def on_outcome(self, evaluation: Evaluation, outcome: ScoreResult | ChunkFailed) -> bool:
        """Store what a trial actor reported. Returns True if that finishes the evaluation.

        Raises EvidenceMismatch if the result is not of the requested recipe, sources or prompts, and StudyFailed if a
        metric fails on the base model, or void samples have other values when they are scored again, which end the
        study; StudyUnusable if an engine cannot use its models or a task, and EngineUnavailable if there is no engine,
        which end this attempt at it.
        """
        self.look_for_faults(at_once=False)
        if isinstance(outcome, ChunkFailed):
            if outcome.fault is not None:
                self._release(evaluation)
                self.on_engine_fault(outcome.fault)
                return True
            outcome.raise_if_final()
            if outcome.kind is FailureKind.CRASH:
                return self._on_crash(evaluation, outcome)
            if outcome.kind is FailureKind.METRIC and self._is_base(evaluation):
                raise StudyFailed(f"the answers of the base model itself cannot be scored: {outcome.reason}")
            self._fail(evaluation, outcome.reason)
            return True
        self._observer("chunk")
        trial = evaluation.trial
        if self._rescoring.is_void(outcome.evidence.replica, outcome.evidence.canaries):
            self._release(evaluation)
            return True
        result = self._provenance.check(evaluation, outcome)
        for warning in out_of_range(trial, self.plan.objectives, evaluation.split, result.values):
            self._writer.add_event(EventKind.OUT_OF_RANGE, warning.to_json())
        again, changed = self._rescoring.compare(evaluation, result, self._trials.values())
        known = tuple(s for s in result.samples if (s.objective, s.position) not in changed)
        self._writer.record_chunk(trial, evaluation.split, replace(result, samples=known), again=again)
        self._observer("commit")
        if result.evidence.replica not in self._replicas:
            self._replicas.add(result.evidence.replica)
            replica, engine = result.evidence.replica, result.evidence.engine
            self._writer.add_event(EventKind.REPLICA, {"replica": replica, "engine": engine, "trial": trial})
        digest, split = evaluation.recipe.digest, evaluation.split
        self._samples.add(digest, split, result.samples)
        num_scored = len(known) - len(again) if split is Split.SEARCH else None
        self._trials[trial] = self._trials[trial].after_chunk(result.timings_s, num_scored)
        if self._rescoring.has_void(digest, split) or self._samples.missing(digest, evaluation.rung, split):
            if not evaluation.ends_with(result):
                return False
            self._release(evaluation)  # what it scored, or found stored, has become void meanwhile
        else:
            self._finish(evaluation)
        return True

    def _on_crash(self, evaluation: Evaluation, failed: ChunkFailed) -> bool:
        event, failure = self._crashes.add(evaluation, failed)
        self._writer.add_event(EventKind.CRASH, event)
        return failure is not None and self.on_outcome(evaluation, failure)

    def on_missing_actors(self, text: str, *, running: int, wanted: int) -> None:
        self._writer.add_event(EventKind.ACTORS, {"running": running, "wanted": wanted, "reason": text})

    def _is_base(self, evaluation: Evaluation) -> bool:
        """Whether it is the search's evaluation of the base model."""
        trial = self._trials[evaluation.trial]
        return evaluation.split is Split.SEARCH and (trial.origin, trial.label) == (Origin.SOURCE, "base")

    def _release(self, evaluation: Evaluation) -> None:
        """Take an evaluation back: it starts again with what is then missing."""
        self._in_flight.pop(evaluation.trial, None)

    def on_lost(self, evaluation: Evaluation, reason: str) -> None:
        """The trial actor died. Its evaluation starts again after the last stored chunk."""
        number = evaluation.trial
        if number not in self._in_flight:
            return
        self._lost_actors[number] = self._lost_actors.get(number, 0) + 1
        logger.warning("trial %d: its actor died (%s)", number, reason)
        if self._lost_actors[number] >= MAX_LOST_ACTORS:
            self._fail(evaluation, f"its trial actor died {MAX_LOST_ACTORS} times; the last time: {reason}")
        else:
            self._release(evaluation)

    # -- starting and resuming -------------------------------------------------------------------------------------

    def _replay(self) -> None:
        """Rebuild the table from the store, and store the decisions that a crash prevented."""
        for bracket in self._store.brackets(self.plan.study_id):
            self.table.open_bracket(bracket.bracket, first_rung=bracket.first_rung, size=bracket.size)
        for trial in self._store.trials(self.plan.study_id):
            self._remember(trial)
        for number, (origin, label, recipe) in enumerate(self.plan.baselines):
            if number not in self._trials:
                self._add(TrialRecord(number, origin, label, TrialState.WAITING, recipe))
        decisions: list[Decision] = []
        for rung in range(len(self.plan.rung_samples)):
            for trial in self.trials:
                stored = [record for record in trial.rungs if record.rung == rung]
                if stored:
                    decisions += self.table.record(trial.number, rung, self.plan.costs(stored[0].values))
                elif trial.state is TrialState.FAIL and rung == self._rung_of_failure(trial):
                    decisions += self.table.fail(trial.number)
        self._apply(decisions)
        self._check_exhausted()

    def _know_at_looks(self, trial: TrialRecord) -> None:
        """Keep what a source or published recipe that is scored in full has at lower rungs."""
        if trial.bracket is None and trial.state is TrialState.COMPLETE:
            records = (self._samples.rung_record(trial.recipe, rung) for rung in range(self.table.last_rung))
            lower = {record.rung: record.values for record in records}
            self.table.know(trial.number, {rung: self.plan.costs(values) for rung, values in lower.items()})
            self._feasibility.know(trial.number, lower)

    def _rung_of_failure(self, trial: TrialRecord) -> int:
        if trial.rungs:
            return trial.rungs[-1].rung + 1
        if trial.bracket is None:
            return self.table.last_rung
        return next(b for b in self._store.brackets(self.plan.study_id) if b.bracket == trial.bracket).first_rung

    def _remember(self, trial: TrialRecord) -> None:
        self._trials[trial.number] = trial
        self._digests.setdefault(trial.recipe.digest, trial.number)
        self.table.add_trial(trial.number, trial.bracket)
        self._know_at_looks(trial)

    def _add(self, trial: TrialRecord) -> None:
        self._writer.add_trial(trial)
        self._remember(trial)

    def _maybe_start_holdout(self) -> None:
        if self.is_holdout_stage or not self.plan.holdout_samples:
            return
        if self.table.is_finished and not self._in_flight:
            self.is_holdout_stage = True
            self._holdout = [
                trial.number
                for trial in held_out(self.trials, self.plan.objectives)
                if self._samples.missing(trial.recipe.digest, 0, Split.HOLDOUT)
            ]
            self._writer.add_event(EventKind.HOLDOUT_STARTED, {"trials": list(self._holdout)})

    # -- proposals -------------------------------------------------------------------------------------------------

    def _ask(self, *, timeout_s: float) -> bool:
        """Take the searcher's proposal if it is ready, else request one. Returns True if a trial was added."""
        if self.is_holdout_stage or not self._feasibility.is_known():
            return False
        if self._asking.proposal is None:
            self._check_limits()
            proposal = self.table.proposal()
            if proposal is None:
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
        try:
            self._space.parameters.check(configuration)
            configuration = self._space.parameters.repair(configuration)
            recipe = replace(self._space.to_recipe(configuration), keeps_equal=self._keeps_equal)
        except SearchSpaceError as error:
            raise StudyFailed(f"trial {proposal.number}: the searcher left the search space: {error}") from error
        if proposal.opens is not None:
            first_rung, size = proposal.opens.first_rung, proposal.opens.num_configurations
            self._writer.open_bracket(BracketRecord(proposal.bracket, first_rung, size))
            self.table.open_bracket(proposal.bracket, first_rung=first_rung, size=size)
        self._add(
            TrialRecord(
                number=proposal.number,
                origin=Origin.SEARCH,
                label=f"trial {proposal.number}",
                state=TrialState.WAITING,
                recipe=recipe,
                configuration=configuration,
                bracket=proposal.bracket,
                timings_s={"ask": ask_s},
            )
        )
        self._check_exhausted()
        repeated = self._evaluation(self._trials[proposal.number], self.table.next_rung(proposal.number), Split.SEARCH)
        if not repeated.chunks:
            self._finish(repeated)

    def _check_exhausted(self) -> None:
        most = self.plan.max_duplicates
        if num_duplicates_in_a_row(self.trials, self._digests) >= most:
            self._end_search(f"the last {most} proposals were recipes scored already: the space is exhausted")

    def _check_limits(self) -> None:
        if not self.table.is_search_over and (reason := self._is_out_of_budget()) is not None:
            self._end_search(reason)

    def _end_search(self, reason: str) -> None:
        self.end_of_search = reason
        self._writer.add_event(EventKind.SEARCH_ENDED, {"reason": reason})
        for bracket in self.table.end_search():
            self._writer.resize_bracket(bracket, self.table.size(bracket))
            self._apply(self.table.decide(bracket))

    # -- evaluations -----------------------------------------------------------------------------------------------

    def _ready(self) -> list[tuple[int, int, Split]]:
        if self.is_holdout_stage:
            return [(number, 0, Split.HOLDOUT) for number in self._holdout]
        return [(number, rung, Split.SEARCH) for number, rung in self.table.ready()]

    def _num_unstarted(self) -> int:
        """Proposed trials without a result, whose recipe is not in flight either."""
        busy = {flying.recipe.digest for flying in self._in_flight.values()}
        new = (self._trials[number] for number, _, split in self._ready() if split is Split.SEARCH)
        return sum(t.origin is Origin.SEARCH and not t.rungs and t.recipe.digest not in busy for t in new)

    def _evaluation(self, trial: TrialRecord, rung: int, split: Split) -> Evaluation:
        chunks = self._samples.missing_chunks(trial.recipe.digest, rung, split)
        evaluation = Evaluation(self.plan.study_id, trial.number, rung, split, trial.recipe, chunks)
        return replace(evaluation, crashes=self._crashes.count(evaluation))

    def _finish(self, evaluation: Evaluation) -> None:
        """All samples of the evaluation are stored: finish its rung, and promote if that completes one."""
        number = evaluation.trial
        self._in_flight.pop(number, None)
        if evaluation.is_again:
            return
        if evaluation.split is Split.HOLDOUT:
            self._holdout.remove(number)
            self._writer.add_event(EventKind.HOLDOUT_SCORED, {"trial": number})
            self._observer("holdout")
            return
        trial = self._trials[number]
        rung = self._samples.rung_record(trial.recipe, evaluation.rung)
        try:
            costs = self.plan.costs(rung.values)
        except InvalidStudy as error:
            self._fail(evaluation, str(error))
            return
        is_last = evaluation.rung == self.table.last_rung
        rungs = (*trial.rungs, rung)
        # Every rung counts with all its samples; those not scored for this trial were reused from lower rungs or from
        # trials with an equal recipe.
        reused = sum(sum(record.num_samples.values()) for record in rungs) - trial.samples_scored
        finished = replace(trial, rungs=rungs, samples_reused=reused)
        if is_last:
            finished = replace(
                finished,
                state=TrialState.COMPLETE,
                values=rung.values,
                standard_errors=rung.standard_errors,
            )
        self._writer.finish_rung(number, rung, samples_reused=reused, state=finished.state if is_last else None)
        self._trials[number] = finished
        self._observer("rung")
        self._know_at_looks(self._trials[number])
        self._apply(self.table.record(number, evaluation.rung, costs))

    def _apply(self, decisions: Iterable[Decision]) -> None:
        for decision in decisions:
            pruned = [n for n in decision.pruned if not self._trials[n].state.is_finished]
            if not pruned:
                continue
            self._observer("promotion")
            reason = decision.reason or f"not promoted from rung {decision.rung}"
            self._writer.finish_trials(pruned, TrialState.PRUNED, reason)
            for number in pruned:
                self._trials[number] = replace(self._trials[number], state=TrialState.PRUNED, reason=reason)

    def _fail(self, evaluation: Evaluation, reason: str) -> None:
        number = evaluation.trial
        self._in_flight.pop(number, None)
        if evaluation.is_again:
            raise StudyFailed(f"trial {number}: void samples cannot be scored again: {reason}")
        if evaluation.split is Split.HOLDOUT:
            self._holdout.remove(number)
            self._writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": number, "reason": reason})
            return
        self._writer.finish_trials([number], TrialState.FAIL, reason)
        self._trials[number] = replace(self._trials[number], state=TrialState.FAIL, reason=reason)
        self._apply(self.table.fail(number))
