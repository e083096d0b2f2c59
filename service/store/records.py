"""Conversion of database rows to records, and the records that only the store uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from service.types import (
    JobRecord,
    JobState,
    Origin,
    RecipeDigest,
    RungRecord,
    Sharing,
    StoredRecipe,
    TrialRecord,
    TrialResult,
    TrialState,
)
from workers.types import Split

__all__ = [
    "BracketRecord",
    "ChunkWork",
    "EngineFaultRecord",
    "EvaluationRequest",
    "EventRecord",
    "EvidenceRecord",
    "job_record",
    "trial_record",
    "trial_result",
]


@dataclass(frozen=True)
class BracketRecord:
    """A stored Hyperband bracket: a group of configurations that start at the same rung.

    A rung is one of the increasing numbers of samples on which trials are compared. `bracket` is the index of the
    bracket, `first_rung` is the index of the rung at which it starts, and `size` is its number of configurations.
    """

    bracket: int
    first_rung: int
    size: int


@dataclass(frozen=True)
class EventRecord:
    """An event in the history of a job, such as a finished trial.

    `id` grows with time and is never reused. `time` is in seconds since the epoch. `kind` is an `EventKind`, or the
    text that a later version of the program stored. `payload` has details, as JSON, which depend on the kind.
    """

    id: int
    time: float
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class JobEventRecord:
    """An event with the job that it is about: the job's id, kind and name."""

    event: EventRecord
    job: str
    job_kind: str
    name: str


@dataclass(frozen=True)
class EvidenceRecord:
    """Evidence of which weights the engine held when it scored one chunk of samples (up to 512), and the times it took.

    Attributes:
        id: Id of the record in the database.
        study: Id of the study.
        trial: Number of the trial for which the samples were scored.
        recipe_digest: Digest of the recipe (merge) that the engine held.
        bank_fingerprint: Fingerprint of the weights of the source models.
        prompts: Hashes of the scored prompts. The keys are "split objective[start:stop]", with the position of the
            first sample and the position after the last sample.
        weights_checksum: Checksum of the engine's weights after the merge was written into them.
        replica: Id of the engine's replica.
        swap_count: Number of merges that had been written into the engine when it scored the samples.
        engine: Description of the engine: its program, dtype and placement.
        timings_s: Seconds, keyed by step, such as "swap" and "score".
        num_samples: Number of samples.
        finished_at: Time at which the samples were stored, in seconds since the epoch.
        canaries: Number of canaries (comparisons with transformers on fixed prompts) that the engine had passed before;
            None if an earlier version stored the record.
        sample_bytes: Stored size of the samples' values; None if it is not known.
        text_bytes: Stored size of the samples' texts; None if it is not known.
    """

    id: int
    study: str
    trial: int
    recipe_digest: str
    bank_fingerprint: str
    prompts: Mapping[str, str]
    weights_checksum: str
    replica: str
    swap_count: int
    engine: str
    timings_s: Mapping[str, float]
    num_samples: int
    finished_at: float
    canaries: int | None
    sample_bytes: int | None = None
    text_bytes: int | None = None

    def is_of(self, split: Split) -> bool:
        """Whether this record is about samples of `split`, such as the search data or the holdout data."""
        return any(key.startswith(f"{split} ") for key in self.prompts)


@dataclass(frozen=True)
class ChunkWork:
    """Work of a replica on one chunk of samples: the seconds of each phase, and when the samples were stored.

    `finished_at`, the time of storing, is in seconds since the epoch.
    """

    replica: str
    trial: int
    num_samples: int
    timings_s: Mapping[str, float]
    finished_at: float


@dataclass(frozen=True)
class JudgmentRecord:
    """Judgment of one completion by the judge of a benchmark, a model that compares it with a reference answer.

    Attributes:
        benchmark: Name of the benchmark.
        recipe_digest: Digest of the recipe (merge) whose completion was judged.
        position: Index of the sample in the order in which the benchmark's samples are scored.
        is_swapped: Whether the completion was the second answer in the judge's prompt, after the reference answer.
        preference: 1 if the completion is better than the reference answer, 0 if the completion is worse, 0.5 for a
            tie; None if the judge's answer has no verdict.
        model: Name of the judge's model, as the endpoint reported it.
        prompt_digest: The sha256 of the judge's prompt.
        answer: The judge's whole answer.
    """

    benchmark: str
    recipe_digest: str
    position: int
    is_swapped: bool
    preference: float | None
    model: str
    prompt_digest: str
    answer: str


@dataclass(frozen=True)
class EvaluationRequest:
    """A user's request to evaluate a merge at the full budget, which is all samples of the search.

    - `number`: the index of the request among the study's requests, from 0.
    - `trial`: the number of the trial whose recipe is evaluated; None if the user gave a merge instead.
    - `label`: the name of the merge that the user gave; None if `trial` is given.
    - `recipe`, `configuration`: the merge that the user gave, either as the JSON document of a recipe or as a value for
      each parameter of the search space. One of the two is None; both are None if `trial` is given.
    - `added`: the number of the trial that was added for the request; None until a driver has added the trial.
    """

    number: int
    trial: int | None = None
    added: int | None = None
    label: str | None = None
    recipe: Mapping[str, Any] | None = None
    configuration: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class EngineFaultRecord:
    """Record of the first failed check of a replica's engine.

    `id` grows with time. `replica` is the replica's id. `canaries` is the number of canaries (checks with fixed
    prompts) that the engine had passed before. `reason` describes the failure. `time` is in seconds since the epoch.
    """

    id: int
    replica: str
    canaries: int
    reason: str
    time: float


def job_record(row: sa.RowMapping) -> JobRecord:
    values = {name: value for name, value in row.items() if name not in ("idempotency_key", "facts")}
    changed = {
        "state": JobState(row["state"]),
        "accepted": row["facts"],
        "sharing": Sharing(row["sharing"]),
        "tags": tuple(row["tags"] or ()),
    }
    return JobRecord(**{**values, **changed})


def trial_record(row: sa.RowMapping, rungs: tuple[RungRecord, ...]) -> TrialRecord:
    recipe = StoredRecipe(row["recipe_digest"], row["recipe"])
    return TrialRecord(**_result_fields(row, rungs), recipe=recipe, configuration=row["configuration"])


def trial_result(row: sa.RowMapping, rungs: tuple[RungRecord, ...]) -> TrialResult:
    return TrialResult(**_result_fields(row, rungs), recipe=RecipeDigest(row["recipe_digest"]))


def _result_fields(row: sa.RowMapping, rungs: tuple[RungRecord, ...]) -> dict[str, Any]:
    state = TrialState(row["state"])
    is_full = state is TrialState.COMPLETE and bool(rungs)
    return {
        "number": row["number"],
        "origin": Origin(row["origin"]),
        "label": row["label"],
        "state": state,
        "bracket": row["bracket"],
        "reason": row["reason"],
        "invalid": row["invalid"],
        "rival": row["rival"],
        "rungs": rungs,
        "samples_scored": row["samples_scored"],
        "samples_reused": row["samples_reused"],
        "timings_s": row["timings_s"],
        "values": rungs[-1].values if is_full else {},
        "standard_errors": rungs[-1].standard_errors if is_full else {},
    }
