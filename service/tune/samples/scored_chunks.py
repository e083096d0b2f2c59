"""Checks and stores the results that engines return for chunks of samples.

Results of an engine that later failed a check are removed and scored again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from search_spaces.objectives import Objective
from service.results.ranges import out_of_range
from service.store import JobWriter, Store
from service.tune.evaluation import Evaluation
from service.tune.plan import Plan
from service.tune.samples.provenance import ProvenanceCheck
from service.tune.samples.rescoring import Rescoring
from service.tune.samples.sample_cache import SampleCache
from service.tune.trials import Trials
from service.types import EventKind
from workers.errors import EngineFault
from workers.types import ScoreResult, Split

__all__ = ["ScoredChunks"]


class ScoredChunks:
    """The results that engines return in a study: checked, stored, and removed if their engine later fails a check.

    Samples are kept in the cache `samples`, and stored in the database by `writer`; `store` reads the results of
    earlier drivers. `plan` has the study's settings and `trials` has its trials. `observer` is called with "commit"
    whenever the result of a request was stored, so that tests can stop the process at this moment.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        trials: Trials,
        samples: SampleCache,
        store: Store,
        writer: JobWriter,
        observer: Callable[[str], None],
    ) -> None:
        self._plan = plan
        self._trials = trials
        self._samples = samples
        self._store = store
        self._writer = writer
        self._observer = observer
        evidence = store.evidence(plan.study_id)
        self._replicas = {row.replica for row in evidence}
        self._provenance = ProvenanceCheck(plan.bank_fingerprint, evidence)
        self._rescoring = Rescoring(plan.study_id, store, writer, samples)

    @property
    def is_rescoring(self) -> bool:
        """Whether any samples must still be scored again, because their engine failed a check."""
        return self._rescoring.is_pending

    def next_rescoring(self, in_flight: Iterable[Evaluation]) -> Evaluation | None:
        """An evaluation that scores samples of one recipe again, because their engine failed a check.

        Recipes that are being evaluated (`in_flight`) are passed over. Returns None if no other recipe has samples to
        score again.
        """
        return self._rescoring.next_evaluation(in_flight, trial_of=self._trials.first_with)

    def report_fault(self, fault: EngineFault) -> None:
        """Store that an engine failed a check of its weights or outputs, as `fault` describes.

        Raises StudyFailed if too many engines have failed a check.
        """
        self._rescoring.report(fault)
        self.look_for_faults()

    def look_for_faults(self, *, at_once: bool = True) -> None:
        """Find engines that failed a check in any study, and let the affected samples of this study be scored again.

        If `at_once` is False, the store is read at most once a second.
        """
        if self._rescoring.look(at_once=at_once):
            stored = self._store.evidence(self._plan.study_id)
            valid = [row for row in stored if not self._rescoring.is_void(row.replica, row.canaries)]
            self._provenance = ProvenanceCheck(self._plan.bank_fingerprint, valid)

    def add(self, evaluation: Evaluation, result: ScoreResult) -> bool:
        """Check and store an engine's result for one chunk (the samples of one request) of `evaluation`.

        Returns False, and stores nothing, if the engine failed a check after scoring, so that the samples must be
        scored again. Raises EvidenceMismatch if the result belongs to another recipe, other sources or other prompts
        than requested. Raises StudyFailed if samples that are scored again have other values than before.
        """
        trial, split = evaluation.trial, evaluation.split
        if self._rescoring.is_void(result.evidence.replica, result.evidence.canaries):
            return False
        result = self._provenance.check(evaluation, result)
        for warning in out_of_range(trial, self._objectives(split), split, result.values):
            self._writer.add_event(EventKind.OUT_OF_RANGE, warning.to_json())
        again, changed = self._rescoring.compare(evaluation, result, self._trials.values())
        known = tuple(s for s in result.samples if (s.objective, s.position) not in changed)
        self._writer.record_chunk(trial, split, replace(result, samples=known), again=again)
        self._observer("commit")
        replica, engine = result.evidence.replica, result.evidence.engine
        if replica not in self._replicas:
            self._replicas.add(replica)
            self._writer.add_event(EventKind.REPLICA, {"replica": replica, "engine": engine, "trial": trial})
        self._samples.add(evaluation.recipe.digest, split, result.samples)
        num_scored = len(known) - len(again) if split is Split.SEARCH else None
        self._trials.count_chunk(trial, result.timings_s, num_scored=num_scored)
        return True

    def _objectives(self, split: Split) -> tuple[Objective, ...]:
        if split is Split.BENCHMARK:
            return tuple(b.objective for b in self._plan.benchmarks if b.judge is None)  # else the values are lengths
        return self._plan.objectives

    def are_complete(self, evaluation: Evaluation) -> bool:
        """Whether all samples of the evaluation are stored, and no sample must be scored again."""
        digest, split = evaluation.recipe.digest, evaluation.split
        return not self._rescoring.has_void(digest, split) and not self._samples.missing(digest, evaluation.rung, split)
