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
    """A stored Hyperband bracket: its index, the rung at which it starts, and its number of configurations."""

    bracket: int
    first_rung: int
    size: int


@dataclass(frozen=True)
class EventRecord:
    """An event in the history of a job, such as a finished rung.

    `id` grows with time and is never reused. `time` is in seconds since the epoch. `kind` is an `EventKind`, or the
    text that a later version of the program stored. `payload` has details, as JSON, which depend on the kind.
    """

    id: int
    time: float
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class EvidenceRecord:
    """Evidence of one scored chunk of samples: the weights that the engine held, and the times of the steps.

    `prompts` has hashes of the scored prompts. Its keys are "split objective[start:stop]", with the position of the
    first sample and the position after the last sample. `finished_at` is in seconds since the epoch. `canaries` is the
    number of canaries (checks with fixed prompts) that the engine had passed before it scored the chunk; None if an
    earlier version stored the chunk. The other fields are those of `workers.types.Evidence` and `ScoreResult`.
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
        """Whether the samples of the chunk belong to `split`, such as the search data or the holdout data."""
        return any(key.startswith(f"{split} ") for key in self.prompts)


@dataclass(frozen=True)
class JudgmentRecord:
    """Judgment of one completion by the judge of a benchmark.

    Attributes:
        benchmark: Name of the benchmark.
        recipe_digest: Digest of the recipe whose completion was judged.
        position: Position of the sample in the order of scoring.
        is_swapped: Whether the completion was the second answer in the prompt, after the reference answer.
        preference: 1 if the completion is better than the reference answer, 0 if it is worse, 0.5 for a tie; None if
            the judge's answer has no verdict.
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
    """A user's request to evaluate the recipe of a trial at the full budget.

    `number` counts the requests of the study. `trial` is the number of the trial with the recipe. `added` is the number
    of the trial that was added for the request; None until a driver has added one.
    """

    number: int
    trial: int
    added: int | None = None


@dataclass(frozen=True)
class EngineFaultRecord:
    """The first check that a replica's engine failed.

    `id` grows with time. `canaries` is the number of canaries (checks with fixed prompts) that the engine had passed
    before. `reason` describes the failure. `time` is in seconds since the epoch.
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
        "rungs": rungs,
        "samples_scored": row["samples_scored"],
        "samples_reused": row["samples_reused"],
        "timings_s": row["timings_s"],
        "values": rungs[-1].values if is_full else {},
        "standard_errors": rungs[-1].standard_errors if is_full else {},
    }
