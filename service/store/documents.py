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
    "ALIGNMENTS",
    "ALIGNMENT_COST",
    "ATTACKS",
    "BENCHMARKS",
    "CANARIES",
    "CONTAMINATION",
    "ENDPOINT",
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
# The names of a study's alignments, each of which is the sha256 of a file, in rows [layer, layer, name].
ALIGNMENTS = "alignments"
# The address and the secret of the HTTP application of a served study's driver.
ENDPOINT = "endpoint"
# The evaluations, as [trial, rung], that were running when a study's search was asked to end early.
STOPPING = "stopping"
BENCHMARKS, CONTAMINATION, ATTACKS = "benchmarks", "contamination", "attacks"


@dataclass(frozen=True)
class BenchmarkFacts:
    """Description of a benchmark's task and samples, stored when the benchmark is first scored.

    Attributes:
        name: Name of the benchmark, under which its samples are stored.
        metric: Name of the task's metric.
        direction: Whether large or small values of the metric are better.
        range: Lowest and highest value of the metric; None for [0, 1].
        task_digest: Digest of the task's definition and data. Samples of tasks with other digests are not comparable.
        num_samples: Number of samples of the task.
        subtasks: Names and sizes of the subtasks, if the task consists of several subtasks.
        categories: Subsets of the subtasks: the names of the subtasks in each category, keyed by the category's name.
        seed: Seed of the random order in which the samples are scored.
        attack: The option `attack` of the study file, for adversarial prompts; None if the benchmark is not attacked.
        template: The prompt template that the attack changes; empty without an attack.
        judge: The option `judge` of the study file, for a model that compares answers; None if the benchmark has no
            judge.
        reference_length: Mean number of characters of the reference answers with which a judge compares; 0 without a
            judge.
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
        """Describe how this benchmark's task differs from its earlier description `stored`; "" if they are equal."""
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
        """The benchmark in the form of an objective of a study: its name, metric, direction and range."""
        return Objective(self.name, self.metric, self.direction, self.range)


@dataclass(frozen=True)
class AttackResult:
    """Result of an adversarial attack on the prompts of a benchmark for one recipe (merge).

    An attack changes words of the prompt template and looks for the template with which the merge does worst.

    Attributes:
        benchmark: Name of the benchmark.
        recipe: Digest of the recipe.
        template: The prompt template with which the merge's metric is worst. The field has the original template if no
            changed template is worse.
        samples: Name under which the samples with this template are stored.
        num_queries: Number of changed templates that were scored on all samples; the original template does not count.
        is_cut: Whether the attack ended early because it had scored as many templates as the study file's option
            `max_queries` allows.
    """

    benchmark: str
    recipe: str
    template: str
    samples: str
    num_queries: int
    is_cut: bool


@dataclass(frozen=True)
class Overlap:
    """Number of items of a holdout task or a benchmark that are also in the search data.

    Attributes:
        section: Section of the study file that has the task: "holdout" or "benchmarks".
        name: Name of the task in that section.
        num_items: Number of the task's items.
        num_exact: Number of items whose whole text is also an item of the search data.
        num_ngrams: Number of items that have 13 consecutive words in common with an item of the search data, including
            the items counted by `num_exact`.
        by_objective: Number of items that overlap with the search data of an objective, keyed by objective.
        examples: Positions of some overlapping items in the task's data.
        is_allowed: Whether the study file permits the overlap of this task, in its option `contamination.allowed`.
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
        """Share of the items of the holdout task or benchmark, from 0 to 1, that are also in the search data."""
        return self.num_ngrams / self.num_items if self.num_items else 0.0


def read_attacks(document: Any) -> tuple[AttackResult, ...]:
    """Read the results of adversarial attacks on the prompts of a study's benchmarks from the stored `document`.

    Returns an empty tuple if `document` is None: no attack has ended yet.
    """
    return () if document is None else TypeAdapter(tuple[AttackResult, ...]).validate_python(document)


def read_benchmarks(document: Any) -> tuple[BenchmarkFacts, ...]:
    """Read the descriptions of a study's benchmarks from their stored JSON `document`; empty if `document` is None."""
    return () if document is None else TypeAdapter(tuple[BenchmarkFacts, ...]).validate_python(document)


def read_contamination(document: Any) -> tuple[Overlap, ...]:
    """Read the overlaps of a study's holdout tasks and benchmarks with its search data, from the stored `document`.

    Returns an empty tuple if `document` is None.
    """
    return () if document is None else TypeAdapter(tuple[Overlap, ...]).validate_python(document)


@dataclass(frozen=True)
class AlignmentCost:
    """Time, in `seconds`, that all drivers (processes) of a study together took to learn its alignments.

    Alignments are maps between layers of different models; some merges need alignments.
    """

    seconds: float = 0.0


@dataclass(frozen=True)
class StartPolicy:
    """Checkpoint of a policy (a network that proposes configurations) of an earlier study, from which a study starts.

    `digest` is the checkpoint's sha256. `iteration` is the number of the last iteration of trials on which the policy
    was trained.
    """

    iteration: int
    digest: str


@dataclass(frozen=True)
class PolicyStart:
    """Trained policies of an earlier study, which are the initial policies of a new study.

    A policy is a network that proposes configurations. `study` and `name` are the id and name of the earlier study.
    `policies` has a stored checkpoint for each policy of the new study.
    """

    study: str
    name: str
    policies: tuple[StartPolicy, ...]


@dataclass(frozen=True)
class WarmStart:
    """Results of an earlier study that the searcher of a new study has from the beginning.

    `study` and `name` are the id and name of the earlier study. `rungs` is "all" if results on a part of the samples
    are used too, or "full" if only results on all samples are used. `num_trials` and `num_observations` are the numbers
    of trials and of results that are used. `digest` is the digest of the stored file with the results.
    """

    study: str
    name: str
    rungs: str
    num_trials: int
    num_observations: int
    digest: str


@dataclass(frozen=True)
class RemovedResponses:
    """Record that a study's model responses and tokens were removed to save space.

    `removed_at` is the time in seconds since the epoch. `num_samples` is the number of samples whose responses were
    removed, and `num_bytes` is the size of the removed data.
    """

    removed_at: float
    num_samples: int
    num_bytes: int


@dataclass(frozen=True)
class Canaries:
    """Samples and engines of a study that canaries, which are checks of engines with fixed prompts, did not confirm.

    `samples_not_checked` is the number of the study's samples whose engine has passed no canary after it scored them;
    None before the study's end. `skipped` has the reasons why canaries could not be run, keyed by replica (the process
    of an engine).
    """

    samples_not_checked: int | None = None
    skipped: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TrialVerification(VerificationReport):
    """Report of the verification of one trial: its samples scored again with Hugging Face transformers instead of vLLM.

    `trial` is the trial's number. `samples` is a digest of the stored samples that were compared; None in reports of
    earlier versions.
    """

    trial: int
    samples: str | None = None


@dataclass(frozen=True)
class Verification:
    """Result of a study's verification, which scores some trials again with Hugging Face transformers instead of vLLM.

    The result contains a report for each verified trial. `reason` says why no trial was chosen; None if trials were
    chosen.
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
    """Read the time that a study took to learn alignments (maps between layers), from its stored JSON `document`.

    If `document` is None, the result is 0 seconds.
    """
    return _ALIGNMENT_COST.validate_python(document or {})


def read_canaries(document: Mapping[str, Any] | None) -> Canaries:
    """Read which samples and engines of a study canaries (checks with fixed prompts) did not confirm.

    `document` is the stored JSON document. If it is None, nothing is stored, and each field of the result has its
    default.
    """
    return _CANARIES.validate_python(document or {})


def read_policy_start(document: Mapping[str, Any] | None) -> PolicyStart | None:
    """Read from the stored JSON `document` from which trained policies of an earlier study a study starts.

    A policy is a network that proposes configurations. Returns None if `document` is None: the study starts without
    trained policies.
    """
    return None if document is None else _POLICY_START.validate_python(document)


def read_verification(document: Mapping[str, Any] | None) -> Verification:
    """Read the result of a study's verification from its stored JSON `document`.

    A verification scores stored samples again with transformers instead of vLLM. If `document` is None, nothing is
    stored, and the result has no reports. Reports of earlier versions, which compared only the values of samples, are
    read too.
    """
    found = dict(document or {})
    found["reports"] = [_with_kinds(report) for report in found.get("reports", ())]
    return _VERIFICATION.validate_python(found)


def read_removed_responses(document: Mapping[str, Any] | None) -> RemovedResponses | None:
    """Read from the stored JSON `document` when a study's model responses were removed, and of how many samples.

    Returns None if `document` is None, which means that the responses were not removed.
    """
    return None if document is None else _RESPONSES.validate_python(document)


def read_warm_start(document: Mapping[str, Any] | None) -> WarmStart | None:
    """Read, from the stored JSON `document`, the results of an earlier study that a study's searcher starts with.

    Returns None if `document` is None, which means that the searcher starts without earlier results.
    """
    return None if document is None else _WARM_START.validate_python(document)


def _with_kinds(report: Mapping[str, Any]) -> dict[str, Any]:
    tolerance = report["tolerance"]
    differences = [
        {"what": "value", "is_beyond": found["top2_gap"] > tolerance, **found} for found in report["differences"]
    ]
    return {**report, "differences": differences}
