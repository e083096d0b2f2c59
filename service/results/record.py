"""Run record: the data from which a study's result files, report and API responses are computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from search_spaces.objectives import Candidate, Objective
from service.results.benchmarks import BenchmarkTable
from service.results.feasibility import sources_of
from service.results.finding import RivalTest
from service.results.holdout import FrontVolume
from service.results.pictures import Contrast
from service.results.ranges import OutOfRange
from service.results.selection import best_trial, candidates, front_of
from service.store.documents import Overlap, PolicyStart, RemovedResponses, WarmStart
from service.store.steps import GradientStep, UpdateStep
from service.types import Comparison, Estimate, JobRecord, Origin, Steering, TrialRecord, TrialResult
from workers.types import VerificationReport

__all__ = ["EngineFigures", "RunRecord", "SearchFigures", "StoredBytes"]


@dataclass(frozen=True)
class EngineFigures:
    """Numbers about the engines of a study: starts, seconds of swaps and scoring, share of busy time.

    A canary is a comparison of an engine with transformers on fixed prompts.

    Attributes:
        starts: Number of engine starts, including the starts of engines that were killed.
        kinds: Description of each kind of engine: program, dtype, and the size of the source weights and where they are
            kept.
        swap_s: Seconds of each recipe swap, which computes a merge and writes it into the engine.
        score_s: Seconds in which engines scored samples of the search, added up over engines.
        busy_fraction: Share of the search's wall-clock in which an engine was scoring or swapping; None if this share
            was not measured.
        samples_not_checked: Number of samples that were scored after the last canary that their engine passed; None
            before the study has ended.
        skipped: Reasons why canaries could not be run at the end of the study.
    """

    starts: int = 0
    kinds: tuple[str, ...] = ()
    swap_s: tuple[float, ...] = ()
    score_s: float = 0.0
    busy_fraction: float | None = None
    samples_not_checked: int | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredBytes:
    """Bytes that a study's samples take in the database: for metric values (`values`), and for responses (`texts`)."""

    values: int = 0
    texts: int = 0


@dataclass(frozen=True)
class SearchFigures:
    """The searcher of a study, and the losses and gradients that were computed for it.

    Attributes:
        algorithm: Name of the searcher; None in studies of early versions.
        reason: Reason why the searcher was chosen; None in studies of early versions.
        notes: Notes that the searcher stored during the study.
        start: Trained policies of another study with which the searcher's own policies were initialised.
        warm_start: Results of an earlier study that the searcher knew from its first proposal on.
        steps: Number of computations of losses or a gradient.
        charges: Number of samples that these computations count as in the study's limit of samples, keyed by the number
            of the trial for whose proposal they were made.
    """

    algorithm: str | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()
    start: PolicyStart | None = None
    warm_start: WarmStart | None = None
    steps: int = 0
    charges: Mapping[int, int] = field(default_factory=dict)

    @property
    def step_samples(self) -> int:
        """Number of samples that losses and gradients for the searcher count as in the study's limit of samples.

        They score no samples themselves.
        """
        return sum(self.charges.values())


@dataclass(frozen=True)
class RunRecord:
    """All data from which a study's result files and report are computed.

    The fields from `holdout` to `split_difference` are the fields of `service.results.holdout.HeldOut`, and are empty
    before trials are scored on holdout data.

    Attributes:
        full_budget: Number of samples of each objective on which a trial is scored if it is not pruned.
        holdout: A row for each trial scored on holdout data, with differences "this row minus `holdout_reference`".
        contrasts: Held-out samples with pictures on which the best merge and a baseline differ; empty for text.
        benchmarks: Results on the benchmarks, which are scored after the search.
        contamination: Overlaps of holdout data and benchmarks with the search data.
        warnings: Samples with values outside the range of their objective.
        verifications: Reports on the trials whose samples were compared with plain transformers.
        verification_reason: Reason why no trial was verified.
        gradients: Computations of losses and their gradients for the searcher.
        updates: Updates of the policies with which the searcher `hm3` builds layer paths; empty for other searchers.
        alignment_s: Seconds that were needed to learn the alignments (maps between layers of different models); 0 if no
            alignments were learned.
        steering: Requests to pause, resume, stop or cancel the study, each with its time in seconds since the epoch.
        max_samples: Limit of samples of the search; None if the search has no limit.
        samples_per_second: Samples that the search scored per second; None if nothing was scored.
        removed_responses: When responses and tokens of the samples were removed; None if responses and tokens are still
            stored.
        tokens_per_second: Tokens that each recipe's merge generated per second on holdout data, keyed by recipe digest.
    """

    study: JobRecord
    objectives: tuple[Objective, ...]
    trials: tuple[TrialResult, ...]
    full_budget: Mapping[str, int]
    holdout: tuple[Comparison, ...] = ()
    holdout_reference: int | None = None
    holdout_failures: tuple[tuple[int, str], ...] = ()
    holdout_volume: FrontVolume | None = None
    rival_tests: tuple[RivalTest, ...] = ()
    selection_bias: Mapping[str, Estimate] = field(default_factory=dict)
    split_difference: Mapping[str, Estimate] = field(default_factory=dict)
    contrasts: tuple[Contrast, ...] = ()
    benchmarks: BenchmarkTable = field(default_factory=BenchmarkTable)
    contamination: tuple[Overlap, ...] = ()
    warnings: tuple[OutOfRange, ...] = ()
    verifications: tuple[VerificationReport, ...] = ()
    verification_reason: str | None = None
    engine: EngineFigures = field(default_factory=EngineFigures)
    search: SearchFigures = field(default_factory=SearchFigures)
    gradients: tuple[GradientStep, ...] = ()
    updates: tuple[UpdateStep, ...] = ()
    alignment_s: float = 0.0
    max_samples: int | None = None
    steering: tuple[tuple[float, Steering], ...] = ()
    wall_clock_s: float = 0.0
    samples_per_second: float | None = None
    stored_bytes: StoredBytes = field(default_factory=StoredBytes)
    removed_responses: RemovedResponses | None = None
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    version: str = ""

    @property
    def whole_trials(self) -> tuple[TrialRecord, ...]:
        """All trials of the run, each with its recipe and its configuration.

        This run record (all stored data of a study) must have been read with the recipes of all trials.
        """
        return tuple(map(_whole, self.trials))

    @cached_property
    def best(self) -> TrialRecord | None:
        """The best trial on search data, or None before a trial has been scored on all samples of the search."""
        found = best_trial(self.trials, self.objectives)
        return None if found is None else _whole(found)

    @cached_property
    def has_refined(self) -> bool:
        """Whether trials of the Pareto front were refined: gradients improved their coefficients after the search."""
        return any(trial.origin is Origin.REFINED for trial in self.trials)

    @cached_property
    def compared(self) -> tuple[TrialRecord, ...]:
        """The trials that have results on holdout data, in the order of their numbers."""
        numbers = {row.trial for row in self.holdout}
        return tuple(_whole(trial) for trial in self.trials if trial.number in numbers)

    @cached_property
    def front(self) -> tuple[TrialResult, ...]:
        """The trials on the Pareto front, in the order of their numbers."""
        return front_of(self.candidates)

    @cached_property
    def candidates(self) -> tuple[tuple[TrialResult, Candidate], ...]:
        """The trials from which the Pareto front is selected, each with its costs, in the order of their numbers.

        These are the trials that were scored on all samples of the search.
        """
        return candidates(self.trials, self.objectives)

    @cached_property
    def rung_sizes(self) -> Mapping[int, Mapping[str, int]]:
        """Number of samples as rung -> objective -> number, for every rung that some trial has finished.

        A rung is a number of samples at which trials are compared; it is given by its index from 0.
        """
        return {rung.rung: rung.num_samples for trial in self.trials for rung in trial.rungs}

    @cached_property
    def sources(self) -> tuple[TrialResult, ...]:
        """The trials of the source models: the base model and the experts."""
        return sources_of(self.trials)


def _whole(trial: TrialResult) -> TrialRecord:
    assert isinstance(trial, TrialRecord), f"trial {trial.number} was read without its recipe"
    return trial
