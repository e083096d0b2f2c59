"""JSON documents of a study, stored by name: warm start, alignments, benchmarks, overlaps, verification.

A document is stored as the fields of its type (`dataclasses.asdict`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import TypeAdapter

from search_spaces.objectives import Direction, Objective
from workers.types import VerificationReport

__all__ = [
    "ALIGNMENT_COST",
    "ATTACKS",
    "BENCHMARKS",
    "CANARIES",
    "CONTAMINATION",
    "POLICY_START",
    "RESPONSES",
    "STOPPING",
    "VERIFICATION",
    "WARM_START",
    "AlignmentCost",
    "AttackResult",
    "BenchmarkFacts",
    "Canaries",
    "Overlap",
    "PolicyStart",
    "RemovedResponses",
    "StartPolicy",
    "TrialVerification",
    "Verification",
    "WarmStart",
    "read_alignment_cost",
    "read_attacks",
    "read_benchmarks",
    "read_canaries",
    "read_contamination",
    "read_policy_start",
    "read_removed_responses",
    "read_verification",
    "read_warm_start",
]

CANARIES, POLICY_START, VERIFICATION, WARM_START = "canaries", "policy_start", "verification", "warm_start"
RESPONSES, ALIGNMENT_COST = "responses", "alignment_cost"
# The evaluations, as [trial, rung], that were running when a study's search was asked to end early.
STOPPING = "stopping"
BENCHMARKS, CONTAMINATION, ATTACKS = "benchmarks", "contamination", "attacks"


@dataclass(frozen=True)
class BenchmarkFacts:
    """Description of a benchmark's task and samples, stored when the benchmark is first scored.

    Attributes:
        name: Name of the benchmark, under which its samples are stored.
        metric: Name of the task's metric.
        direction: Direction of the metric.
        range: Lowest and highest value of the metric; None for [0, 1].
        task_digest: Digest of the task (`TaskSpec.digest`). Samples of tasks with other digests are not comparable.
        num_samples: Number of samples of the task.
        subtasks: Names and sizes of the subtasks, if the task is a group of several.
        categories: Groups of subtasks within the task: the names of the subtasks, by the name of the group.
        seed: Seed of the order of the samples (`workers.evaluation.built_tasks.permutation`).
        attack: The option `attack` of the study file; None if the benchmark is not attacked.
        template: The prompt template that is attacked.
        judge: The option `judge` of the study file; None if the benchmark has no judge.
        reference_length: Mean number of characters of the reference answers that a judge compares with; 0 without one.
    """

    name: str
    metric: str
    direction: Direction
    range: tuple[float, float] | None
    task_digest: str
    num_samples: int
    subtasks: tuple[tuple[str, int], ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int = 0
    attack: Mapping[str, Any] | None = None
    template: str = ""
    judge: Mapping[str, Any] | None = None
    reference_length: float = 0.0

    def change_since(self, stored: BenchmarkFacts) -> str:
        """Describe how this benchmark's task differs from the stored one, `stored`; "" if they are the same task."""
        if self.task_digest == stored.task_digest:
            return ""
        then, now = (
            f"{facts.num_samples} samples by {facts.metric} (digest {facts.task_digest[:12]})"
            for facts in (stored, self)
        )
        others = dict(stored.subtasks).items() ^ dict(self.subtasks).items()
        in_subtasks = f"; subtasks that differ are {', '.join(sorted({name for name, _ in others}))}" if others else ""
        return f"stored are {then}, the study file now describes {now}{in_subtasks}"

    @property
    def objective(self) -> Objective:
        """The benchmark as an objective: its name, metric, direction and range."""
        return Objective(self.name, self.metric, self.direction, self.range)


@dataclass(frozen=True)
class AttackResult:
    """Result of an adversarial attack on the prompts of a benchmark for one recipe.

    Attributes:
        benchmark: Name of the benchmark.
        recipe: Digest of the recipe.
        template: The prompt template with which the recipe's metric is worst. It is the original template if no changed
            template is worse.
        samples: Name under which the samples with this template are stored.
        num_queries: Number of templates that were scored on all samples, without the original one.
        is_cut: Whether `max_queries` ended the attack.
    """

    benchmark: str
    recipe: str
    template: str
    samples: str
    num_queries: int
    is_cut: bool


@dataclass(frozen=True)
class Overlap:
    """Number of items of a holdout task or benchmark that are also in the search data of an objective.

    Attributes:
        section: "holdout" or "benchmarks".
        name: Name of the entry.
        num_items: Number of its items.
        num_exact: Number of items whose whole text is also an item of the search data.
        num_ngrams: Number of items that have 13 consecutive words in common with an item of the search data, the exact
            ones included.
        by_objective: Number of items that overlap with the search data of an objective, by objective.
        examples: Positions of some overlapping items in the task's data.
        is_allowed: Whether the study file names the entry in `contamination.allowed`.
    """

    section: str
    name: str
    num_items: int
    num_exact: int
    num_ngrams: int
    by_objective: Mapping[str, int] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    is_allowed: bool = False

    @property
    def share(self) -> float:
        """Share of the items that are also in the search data."""
        return self.num_ngrams / self.num_items if self.num_items else 0.0


def read_attacks(document: Any) -> tuple[AttackResult, ...]:
    """Read the results of attacks on a study's benchmarks; empty before the first attack has ended."""
    return () if document is None else TypeAdapter(tuple[AttackResult, ...]).validate_python(document)


def read_benchmarks(document: Any) -> tuple[BenchmarkFacts, ...]:
    """Read the stored descriptions of a study's benchmarks; empty before the first is scored."""
    return () if document is None else TypeAdapter(tuple[BenchmarkFacts, ...]).validate_python(document)


def read_contamination(document: Any) -> tuple[Overlap, ...]:
    """Read how a study's held-out data and benchmarks overlap with its search data."""
    return () if document is None else TypeAdapter(tuple[Overlap, ...]).validate_python(document)


@dataclass(frozen=True)
class AlignmentCost:
    """Seconds that a study took to learn its alignments (maps between layers), over all attempts."""

    seconds: float = 0.0


@dataclass(frozen=True)
class StartPolicy:
    """Checkpoint of a trained policy from which a study starts.

    `digest` is the checkpoint's sha256, `iteration` the last iteration from which the policy has learned.
    """

    iteration: int
    digest: str


@dataclass(frozen=True)
class PolicyStart:
    """Trained policies of another study from which a study's policies start.

    `study` and `name` are the id and name of the study that trained the policies. `policies` has an entry for each
    policy of the new study, in order.
    """

    study: str
    name: str
    policies: tuple[StartPolicy, ...]


@dataclass(frozen=True)
class WarmStart:
    """Results of an earlier study with which a study's searcher starts.

    `study` and `name` are the id and name of the earlier study. `rungs` is "all" if results at every rung are used, or
    "full" if only those at the full budget are. `num_trials` and `num_observations` are the numbers of trials and of
    results that are used. `digest` is the digest of the artifact that has the results.
    """

    study: str
    name: str
    rungs: str
    num_trials: int
    num_observations: int
    digest: str


@dataclass(frozen=True)
class RemovedResponses:
    """Removal of a study's model responses and tokens.

    `removed_at` is the time in seconds since the epoch. `num_samples` and `num_bytes` are the numbers of samples and
    bytes that were removed.
    """

    removed_at: float
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class Canaries:
    """Results of the last canary (a check with fixed prompts) of each engine of a study.

    `samples_not_checked` is the number of the study's samples that were scored after the last canary that their engine
    passed; None before the study's end. `skipped` has the reasons why canaries could not be run, by replica.
    """

    samples_not_checked: int | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrialVerification(VerificationReport):
    """Report of the verification of the trial with the number `trial`.

    `samples` is a digest of the stored samples that were compared; None in reports of earlier versions.
    """

    trial: int
    samples: str | None = None


@dataclass(frozen=True)
class Verification:
    """Result of a study's verification, with a report for each verified trial.

    `reason` says why no trial was chosen for verification; None if trials were chosen.
    """

    reports: tuple[TrialVerification, ...] = ()
    reason: str | None = None


_ALIGNMENT_COST = TypeAdapter(AlignmentCost)
_CANARIES = TypeAdapter(Canaries)
_POLICY_START = TypeAdapter(PolicyStart)
_RESPONSES = TypeAdapter(RemovedResponses)
_VERIFICATION = TypeAdapter(Verification)
_WARM_START = TypeAdapter(WarmStart)


def read_alignment_cost(document: Mapping[str, Any] | None) -> AlignmentCost:
    """Read the stored `AlignmentCost` of a study from its JSON document; `document` None gives 0 seconds."""
    return _ALIGNMENT_COST.validate_python(document or {})


def read_canaries(document: Mapping[str, Any] | None) -> Canaries:
    """Read the stored `Canaries` of a study from their JSON document.

    If `document` is None, nothing is stored, and the result has the default of each field.
    """
    return _CANARIES.validate_python(document or {})


def read_policy_start(document: Mapping[str, Any] | None) -> PolicyStart | None:
    """Read the stored `PolicyStart` of a study from its JSON document.

    Returns None if `document` is None, which means that nothing is stored.
    """
    return None if document is None else _POLICY_START.validate_python(document)


def read_verification(document: Mapping[str, Any] | None) -> Verification:
    """Read the stored `Verification` of a study from its JSON document.

    If `document` is None, nothing is stored, and the result has no reports. Reports of earlier versions, which compared
    only the values of samples, are read too.
    """
    found = dict(document or {})
    found["reports"] = [_with_kinds(report) for report in found.get("reports", ())]
    return _VERIFICATION.validate_python(found)


def read_removed_responses(document: Mapping[str, Any] | None) -> RemovedResponses | None:
    """Read the stored `RemovedResponses` of a study from its JSON document.

    Returns None if `document` is None, which means that the responses were not removed.
    """
    return None if document is None else _RESPONSES.validate_python(document)


def read_warm_start(document: Mapping[str, Any] | None) -> WarmStart | None:
    """Read the stored `WarmStart` of a study from its JSON document.

    Returns None if `document` is None, which means that nothing is stored.
    """
    return None if document is None else _WARM_START.validate_python(document)


def _with_kinds(report: Mapping[str, Any]) -> dict[str, Any]:
    tolerance = report["tolerance"]
    differences = [
        {"what": "value", "is_beyond": found["top2_gap"] > tolerance, **found} for found in report["differences"]
    ]
    return {**report, "differences": differences}
