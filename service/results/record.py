"""The record of a run: everything that result files, report and API are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from search_spaces.objectives import Objective
from service.results.finding import RivalTest
from service.results.holdout import FrontVolume
from service.results.ranges import OutOfRange
from service.types import Comparison, Estimate, JobRecord, TrialRecord
from workers.types import VerificationReport

__all__ = ["EngineFigures", "GradientRecord", "RunRecord", "SearchFigures", "UpdateRecord"]


@dataclass(frozen=True)
class EngineFigures:
    """What the engines of a run were (program, dtype, size and place of the source weights) and did: starts, recipe
    swaps with the seconds of each, and the share of the search's wall-clock in which an engine was scoring or swapping
    (None if not measured).

    `samples_not_checked` counts the samples that were scored after the last canary that their engine passed, None
    before the study's end; `skipped` are the reasons of canaries that could not be made then."""

    starts: int = 0
    kinds: tuple[str, ...] = ()
    swap_s: tuple[float, ...] = ()
    busy_fraction: float | None = None
    samples_not_checked: int | None = None
    skipped: tuple[str, ...] = ()


@dataclass(frozen=True)
class SearchFigures:
    """The searcher of a study, why it was chosen (None in early studies), what it noted on the way, and the steps that
    it computed for its proposals: `charges` is what they are charged, in samples, by the trial that they were computed
    for. `start` says which policies of another study it began with (`service.studies.policies.start`)."""

    algorithm: str | None = None
    reason: str | None = None
    notes: tuple[str, ...] = ()
    start: Mapping[str, Any] | None = None
    steps: int = 0
    charges: Mapping[int, int] = field(default_factory=dict)

    @property
    def step_samples(self) -> int:
        """What all steps are charged, in samples."""
        return sum(self.charges.values())


@dataclass(frozen=True)
class GradientRecord:
    """A gradient that the searcher computed: the losses of its batch by objective, and the weights by which they are
    summed. `descent` names what it belongs to, `proposal` the trial that it was computed for; `preference` is the
    preference vector, empty without one. A `failure` says why there is no loss."""

    descent: str
    proposal: int
    losses: Mapping[str, float]
    weights: Mapping[str, float]
    preference: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class UpdateRecord:
    """An iteration that a policy has learned from: its statistics by name, and the preference vector of the policy,
    empty where there is one policy. `proposal` is the trial that came next."""

    iteration: int
    proposal: int
    statistics: Mapping[str, float]
    preference: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """Everything that result files and report are made of.

    `full_budget` is the sample count per objective at the last rung; `samples_per_second` is of the search, None if
    nothing was scored, `tokens_per_second` of the held-out stage, by recipe digest. `holdout` are the rows of that
    stage, with differences "this row minus `holdout_reference`"; these and what follows from the same samples are
    described in `service.results.holdout`. `verification_reason` says why no trial was to be verified.
    """

    study: JobRecord
    objectives: tuple[Objective, ...]
    trials: tuple[TrialRecord, ...]
    full_budget: Mapping[str, int]
    holdout: tuple[Comparison, ...] = ()
    holdout_reference: int | None = None
    holdout_failures: tuple[tuple[int, str], ...] = ()
    holdout_volume: FrontVolume | None = None
    rival_tests: tuple[RivalTest, ...] = ()
    selection_bias: Mapping[str, Estimate] = field(default_factory=dict)
    split_difference: Mapping[str, Estimate] = field(default_factory=dict)
    warnings: tuple[OutOfRange, ...] = ()
    verifications: tuple[VerificationReport, ...] = ()
    verification_reason: str | None = None
    engine: EngineFigures = field(default_factory=EngineFigures)
    search: SearchFigures = field(default_factory=SearchFigures)
    gradients: tuple[GradientRecord, ...] = ()
    updates: tuple[UpdateRecord, ...] = ()
    wall_clock_s: float = 0.0
    samples_per_second: float | None = None
    tokens_per_second: Mapping[str, float] = field(default_factory=dict)
    version: str = ""
