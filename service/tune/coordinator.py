"""The coordinator of one study: it decides which evaluation runs next, and stores the results.

The coordinator keeps the running evaluations, and handles failed evaluations. The other work is in modules of this
package: `ask_and_tell` decides which trial is evaluated at which rung, `trials` keeps the trials, and `samples` checks
and stores results. After the search come `refinement_stage`, `holdout_stage` and `benchmark_stage`. The coordinator
does not use Ray itself: the module `ray_tune` runs its evaluations.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

from search_spaces.spaces.base import SearchSpace
from service.errors import StudyFailed
from service.store import JobWriter, Store
from service.store.documents import STOPPING
from service.store.steering import SteeringStore
from service.store.steps import GradientStep, UpdateStep
from service.tune.ask_and_tell import AskAndTell
from service.tune.benchmark_stage import BenchmarkStage
from service.tune.crashes import Crashes
from service.tune.evaluation import ChunkFailed, Evaluation, FailureKind
from service.tune.holdout_stage import HoldoutStage
from service.tune.plan import Plan
from service.tune.proposing.proposals import Proposer
from service.tune.refinement_stage import Gradients, RefinementStage
from service.tune.samples.sample_cache import SampleCache
from service.tune.samples.scored_chunks import ScoredChunks
from service.tune.schedulers.base import RungTable
from service.tune.trials import Trials
from service.types import EventKind, Origin, TrialRecord
from workers.errors import EngineFault
from workers.types import ScoreResult, Split

__all__ = ["MAX_LOST_ACTORS", "Coordinator"]

logger = logging.getLogger(__name__)

# A trial fails when its actor has died this often without a chunk being stored. Most deaths come from outside (a lost
# node, a lack of memory), and the same chunk is scored first afterwards: a few deaths are no sign against the trial.
MAX_LOST_ACTORS = 6


class Coordinator:
    """The coordinator of one study: it decides which evaluation runs next, and stores the results.

    - `plan`, `space`: the study's settings, and its search space
    - `store`, `writer`: the database with earlier results, and the writer of new results
    - `proposer`: asks the searcher for proposals
    - `gradients`: computes gradients for the refinement, which improves the coefficients of the front's trials after
      the search; None if the plan has no refinement
    - `observer`: called with a word for the event that has just happened or follows next ("ask", "commit", "promotion",
      ...), so that tests can stop the process at this event
    - `is_out_of_budget`: called before a new trial starts; returns the limit that is exhausted, or None

    The coordinator is not thread-safe: Tune's controller loop is its only caller.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        space: SearchSpace,
        store: Store,
        writer: JobWriter,
        proposer: Proposer,
        gradients: Gradients | None = None,
        observer: Callable[[str], None] = lambda _: None,
        is_out_of_budget: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.plan = plan
        self._writer = writer
        self._observer = observer
        self._store = store
        self._steering = SteeringStore(store)
        self._is_stopped = False
        self._in_flight: dict[int, Evaluation] = {}
        self._num_lost_actors: dict[int, int] = {}
        self._crashes = Crashes(store.events(plan.study_id))
        self._trials = Trials(store.trials(plan.study_id), writer)
        self._samples = SampleCache(plan, store)
        self._chunks = ScoredChunks(
            plan, trials=self._trials, samples=self._samples, store=store, writer=writer, observer=observer
        )
        self._ask_and_tell = AskAndTell(
            plan,
            space=space,
            trials=self._trials,
            brackets=store.brackets(plan.study_id),
            samples=self._samples,
            writer=writer,
            proposer=proposer,
            observer=observer,
            is_out_of_budget=is_out_of_budget,
            num_charged=store.num_charged(plan.study_id),
            num_steps=sum(isinstance(step, (GradientStep, UpdateStep)) for step in store.steps(plan.study_id)),
            told_reason=_told_reason(store, plan.study_id),
        )
        self._refinement = RefinementStage(
            plan,
            space=space,
            trials=self._trials,
            writer=writer,
            gradients=gradients,
            stored=lambda: store.steps(plan.study_id),
            admits=self._ask_and_tell.admits_refinement,
            charge=self._ask_and_tell.charge,
            add=self._ask_and_tell.add,
            is_out_of_budget=is_out_of_budget,
            observer=observer,
        )
        if self._refinement.is_started:
            self._ask_and_tell.end_search()
        self._ask_and_tell.add_requested(self._steering.evaluation_requests(plan.study_id))
        self._holdout = HoldoutStage(plan, trials=self._trials, samples=self._samples, writer=writer)
        self._benchmarks = BenchmarkStage(plan, trials=self._trials, samples=self._samples, store=store, writer=writer)
        self.look_for_faults()

    # -- state -----------------------------------------------------------------------------------------------------

    @property
    def trials(self) -> tuple[TrialRecord, ...]:
        """The trials of the study in their current state, in the order of their numbers."""
        return tuple(self._trials.values())

    @property
    def table(self) -> RungTable:
        """The scheduler of the search, which chooses the next trial to evaluate and the number of samples."""
        return self._ask_and_tell.table

    @property
    def end_of_search(self) -> str | None:
        """The reason why the search ended before its planned number of trials; None if the search did not end early."""
        return self._ask_and_tell.end_reason

    @property
    def stage(self) -> str:
        """The stage of the study, for displays of progress: "searching", "refining", "held-out" or "benchmarks".

        The refinement improves coefficients of the Pareto front's trials after the search. After the refinement, trials
        are scored on held-out data and on benchmarks.
        """
        if self._benchmarks.is_started:
            return "benchmarks"
        if self._holdout.is_started:
            return "held-out"
        return "refining" if self._refinement.is_started else "searching"

    @property
    def num_samples_scored(self) -> int:
        """The number of samples stored for this study, on search data, holdout data and benchmarks together."""
        return self._samples.num_scored

    @property
    def num_samples_used(self) -> int:
        """Number of samples that count towards the study's limit of samples (`limits.max_samples`).

        Every sample that is scored for the search counts. In addition, each computation of losses or a gradient counts
        as the number of samples that its request states (`num_charged` in `service.store.steps`).
        """
        return self._ask_and_tell.num_samples_used

    @property
    def num_steps(self) -> int:
        """The number of gradient steps and policy updates since the study began.

        The number includes the gradient steps of the refinement, which improves the coefficients of the Pareto front's
        trials after the search.
        """
        return self._ask_and_tell.num_steps + self._refinement.num_steps

    @property
    def awaited_judges(self) -> tuple[str, ...]:
        """The URLs of the LLM judges that have not answered all requests yet."""
        return self._benchmarks.awaited_judges

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def is_finished(self) -> bool:
        """Whether nothing is left to do in this study."""
        is_busy = bool(self._in_flight) or self._chunks.is_rescoring
        is_searched = self.table.is_finished and self._refinement.is_finished
        return not is_busy and is_searched and self._holdout.is_finished and self._benchmarks.is_finished

    # -- evaluations to run ----------------------------------------------------------------------------------------

    def next_evaluation(self, *, timeout_s: float = 0.0) -> Evaluation | None:
        """The next evaluation to run, or None if no evaluation can start before a running evaluation has finished.

        If nothing else can be done, the method waits up to `timeout_s` seconds for the searcher's proposal, or for an
        LLM judge's answer. If an engine failed a check of its weights or outputs, the samples that it scored are scored
        again first; no other evaluation starts before that.
        """
        self.look_for_faults(at_once=False)
        self._benchmarks.take_judgments()
        if self._chunks.is_rescoring:
            found = self._chunks.next_rescoring(self._in_flight.values())
            return None if found is None else self._started(found)
        while True:
            asked = self.ask_ahead()  # first, as it may end the search
            if self.table.is_finished and not self._in_flight:
                if self._refinement.start():
                    self._ask_and_tell.end_search()
                    asked |= self.ask_ahead()
                if self.table.is_finished and self._refinement.is_finished:
                    self._holdout.start()
                    if self._holdout.is_finished:
                        self._benchmarks.start()
            busy = self._recipes_in_flight()
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
        """Ask the searcher for trials until `Plan.proposals_ahead` trials wait for an engine.

        Waiting trials keep engines from waiting for the searcher. The method takes at most `timeout_s` seconds. Returns
        True if a trial was added.
        """
        deadline, num_before = time.monotonic() + timeout_s, len(self._trials)
        while not self._chunks.is_rescoring and self._num_unstarted() < self.plan.proposals_ahead:
            if not self._ask(timeout_s=max(0.0, deadline - time.monotonic())):
                break
        return len(self._trials) > num_before

    def _ask(self, *, timeout_s: float) -> bool:
        if self._benchmarks.is_started:
            self._benchmarks.take_judgments(timeout_s=timeout_s)
        if self._holdout.is_started or self._benchmarks.is_started:
            return False
        stage = self._refinement if self._refinement.is_started else self._ask_and_tell
        return stage.ask(timeout_s=timeout_s)

    def _ready(self) -> list[tuple[int, int, Split]]:
        if self._benchmarks.is_started:
            return [(number, index, Split.BENCHMARK) for number, index in self._benchmarks.left]
        if self._holdout.is_started:
            return [(number, 0, Split.HOLDOUT) for number in self._holdout.left]
        return [(number, rung, Split.SEARCH) for number, rung in self._ask_and_tell.ready()]

    def _num_unstarted(self) -> int:
        """The number of proposed trials that wait for an engine.

        A trial is counted if it has no result yet, and if no running evaluation scores the trial's recipe.
        """
        busy = self._recipes_in_flight()
        new = (self._trials[number] for number, _, split in self._ready() if split is Split.SEARCH)
        return sum(t.origin.is_searched and not t.rungs and t.recipe.digest not in busy for t in new)

    def _recipes_in_flight(self) -> set[str]:
        return {flying.recipe.digest for flying in self._in_flight.values()}

    def _evaluation(self, trial: TrialRecord, rung: int, split: Split) -> Evaluation:
        chunks = self._samples.missing_chunks(trial.recipe.digest, rung, split)
        evaluation = Evaluation(self.plan.study_id, trial.number, rung, split, trial.read_recipe(), chunks)
        return replace(evaluation, crashes=self._crashes.count(evaluation))

    def _started(self, evaluation: Evaluation) -> Evaluation:
        self._in_flight[evaluation.trial] = evaluation
        return evaluation

    def close(self) -> None:
        """Cancel the outstanding requests to LLM judges, when the driver stops running the study."""
        self._benchmarks.close()

    def stop(self, reason: str) -> None:
        """End the search and the refinement because of `reason`; only the running evaluations still finish.

        The refinement improves coefficients of the Pareto front's trials after the search. All trials that are not
        being evaluated are pruned, except trials that users have requested. Held-out data and benchmarks are scored
        afterwards as always. A list of the running evaluations is stored, so that a driver that resumes the study
        finishes them too. Calling the method again changes nothing.
        """
        if self._is_stopped or self._holdout.is_started:
            return
        stored = self._store.document(self.plan.study_id, STOPPING)
        if stored is None and self.table.is_finished and self._refinement.is_finished:
            return  # the search had ended before it was asked to
        self._is_stopped = True
        if stored is None:
            flying = sorted(self._in_flight.values(), key=lambda evaluation: evaluation.trial)
            stored = [[each.trial, each.rung] for each in flying if each.split is Split.SEARCH and not each.is_again]
            self._writer.set_document_named(STOPPING, stored)
            self._writer.add_event(EventKind.SEARCH_ENDED, {"reason": reason})
        done = {(trial.number, record.rung) for trial in self._trials.values() for record in trial.rungs}
        running = {number for number, rung in stored if (number, rung) not in done}
        requests = self._steering.evaluation_requests(self.plan.study_id)
        running |= {own.added for own in requests if own.added is not None}
        self._refinement.stop()
        self._ask_and_tell.stop(reason, running=running)

    # -- what comes back -------------------------------------------------------------------------------------------

    def on_outcome(self, evaluation: Evaluation, outcome: ScoreResult | ChunkFailed) -> bool:
        """Handle a trial actor's report on one chunk (the samples of one request) of `evaluation`.

        `outcome` is the samples' result, or the failure to score them. Returns True if the evaluation is finished.
        Errors that end the study, or only the work of this driver (the process that runs the study), are raised.

        Raises:
            EvidenceMismatch: The result belongs to another recipe, other sources or other prompts than requested; the
                study ends.
            StudyFailed: A metric fails on the base model, or samples that were scored again after an engine failed a
                check have other values; the study ends.
            StudyUnusable: An engine cannot use its models or a task; the driver stops.
            EngineUnavailable: There is no engine; the driver stops.
        """
        self.look_for_faults(at_once=False)
        if isinstance(outcome, ChunkFailed):
            return self._on_failure(evaluation, outcome)
        self._observer("chunk")
        is_stored = self._chunks.add(evaluation, outcome)
        if is_stored:
            self._num_lost_actors.pop(evaluation.trial, None)
        if is_stored and self._chunks.are_complete(evaluation):
            self._finish(evaluation)
        elif is_stored and not evaluation.ends_with(outcome):
            return False
        else:  # what it scored, or found stored, is void
            self._release(evaluation)
        return True

    def on_lost(self, evaluation: Evaluation, reason: str) -> None:
        """Restart an evaluation, with its unstored samples, after its trial actor died for `reason`.

        If MAX_LOST_ACTORS actors die one after another, and no samples of the trial are stored between their deaths,
        the trial fails.
        """
        number = evaluation.trial
        if number not in self._in_flight:
            return
        self._num_lost_actors[number] = self._num_lost_actors.get(number, 0) + 1
        logger.warning("trial %d: its actor died (%s)", number, reason)
        if self._num_lost_actors[number] >= MAX_LOST_ACTORS:
            deaths = f"its trial actor died {MAX_LOST_ACTORS} times with the same samples"
            self._fail(evaluation, f"{deaths}; the last time: {reason}")
        else:
            self._release(evaluation)

    def on_missing_actors(self, text: str, *, running: int, wanted: int) -> None:
        """Store an event about missing trial actors: fewer trial actors run than are wanted.

        Trial actors send samples to the engines. `running` and `wanted` are the numbers of actors, and `text` is the
        reason.
        """
        self._writer.add_event(EventKind.ACTORS, {"running": running, "wanted": wanted, "reason": text})

    def on_engine_fault(self, fault: EngineFault) -> None:
        """Record that an engine failed a check of its weights or outputs; `fault` describes the failure.

        The samples that the engine scored since its last passed check must be scored again. Raises StudyFailed if too
        many engines have failed a check.
        """
        logger.warning("%s", fault)
        self._chunks.report_fault(fault)

    def look_for_faults(self, *, at_once: bool = True) -> None:
        """Find engines that failed a check in any study, and let the affected samples of this study be scored again.

        If `at_once` is False, the store is read at most once a second.
        """
        self._chunks.look_for_faults(at_once=at_once)

    def _on_failure(self, evaluation: Evaluation, failed: ChunkFailed) -> bool:
        if failed.fault is not None:
            self._release(evaluation)
            self.on_engine_fault(failed.fault)
            return True
        failed.raise_if_final()
        if failed.kind is FailureKind.CRASH:
            event, consequence = self._crashes.add(evaluation, failed)
            self._writer.add_event(EventKind.CRASH, event)
            return consequence is not None and self.on_outcome(evaluation, consequence)
        if failed.kind is FailureKind.METRIC and self._is_base(evaluation):
            raise StudyFailed(f"the answers of the base model itself cannot be scored: {failed.reason}")
        self._fail(evaluation, failed.reason)
        return True

    def _is_base(self, evaluation: Evaluation) -> bool:
        """Whether the evaluation scores the unchanged base model (one of the baselines) on search data."""
        trial = self._trials[evaluation.trial]
        return evaluation.split is Split.SEARCH and (trial.origin, trial.label) == (Origin.SOURCE, "base")

    def _release(self, evaluation: Evaluation) -> None:
        """Remove an evaluation from the running evaluations.

        The trial can then be evaluated again. Its next evaluation has the samples whose results are still missing.
        """
        self._in_flight.pop(evaluation.trial, None)

    def _finish(self, evaluation: Evaluation) -> None:
        """Finish an evaluation after its last sample was stored, and notify the stage of the study that it belongs to.

        Results on holdout data go to the held-out stage, and results on a benchmark go to the benchmark stage. Results
        on search data at a rung (a number of samples at which trials are compared) go to the search. An evaluation that
        scored samples again (its field `is_again` is True) is reported to no stage, because its trial was finished
        before.
        """
        self._release(evaluation)
        if evaluation.is_again:
            return
        if evaluation.split is Split.HOLDOUT:
            self._holdout.finish(evaluation.trial)
            self._observer("holdout")
        elif evaluation.split is Split.BENCHMARK:
            self._benchmarks.finish(evaluation.trial, evaluation.rung)
            self._observer("benchmark")
        else:
            self._ask_and_tell.finish(evaluation.trial, evaluation.rung)

    def _fail(self, evaluation: Evaluation, reason: str) -> None:
        self._release(evaluation)
        if evaluation.is_again:
            raise StudyFailed(f"trial {evaluation.trial}: void samples cannot be scored again: {reason}")
        if evaluation.split is Split.HOLDOUT:
            self._holdout.fail(evaluation.trial, reason)
        elif evaluation.split is Split.BENCHMARK:
            self._benchmarks.fail(evaluation.trial, evaluation.rung, reason)
        else:
            self._ask_and_tell.fail(evaluation.trial, reason)


def _told_reason(store: Store, study_id: str) -> str | None:
    """The last stored reason why the study's search ended; None if it has not ended yet."""
    ends = store.events(study_id, limit=1, kinds=[EventKind.SEARCH_ENDED], newest_first=True)
    return str(ends[0].payload["reason"]) if ends else None
