"""Conversion of the store's rows to records, and records that only the store has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from search_spaces.recipe import Recipe
from service.types import JobRecord, JobState, Origin, RungRecord, TrialRecord, TrialState
from workers.types import SampleResult, Split

__all__ = [
    "BracketRecord",
    "EngineFaultRecord",
    "EventRecord",
    "EvidenceRecord",
    "VoidSample",
    "job_record",
    "num_tokens",
    "sample_result",
    "tokens_text",
    "trial_record",
]


@dataclass(frozen=True)
class BracketRecord:
    """A stored bracket: its index, the rung at which it starts, and its number of configurations."""

    bracket: int
    first_rung: int
    size: int


@dataclass(frozen=True)
class EventRecord:
    """Something that happened to a job.

    `id` grows with time and is never reused. `kind` is an `EventKind`, or the text that a later version of the program
    stored.
    """

    id: int
    time: float
    kind: str
    payload: Mapping[str, Any]


@dataclass(frozen=True)
class EvidenceRecord:
    """Evidence of one scored chunk: what the engine held meanwhile, and how long the parts of scoring took.

    `prompts` are hashes by "split objective[start:stop]"; `finished_at` is in seconds since the epoch; `canaries` is
    None if an earlier version stored the chunk. The other fields are those of `workers.types.Evidence` and
    `ScoreResult`.
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

    def is_of(self, split: Split) -> bool:
        """Whether the chunk's samples are of this split."""
        return any(key.startswith(f"{split} ") for key in self.prompts)


@dataclass(frozen=True)
class EngineFaultRecord:
    """First failed check of an engine, after `canaries` passed canaries.

    `id` grows with time; `time` is in seconds since the epoch.
    """

    id: int
    replica: str
    canaries: int
    reason: str
    time: float


@dataclass(frozen=True)
class VoidSample:
    """A stored sample that an engine scored after the last canary that it passed, and before it failed a check."""

    recipe_digest: str
    split: Split
    objective: str
    position: int
    value: float
    replica: str


def job_record(row: sa.RowMapping) -> JobRecord:
    values = {name: value for name, value in row.items() if name not in ("idempotency_key", "facts")}
    return JobRecord(**{**values, "state": JobState(row["state"]), "accepted": row["facts"]})


def trial_record(row: sa.RowMapping, rungs: tuple[RungRecord, ...]) -> TrialRecord:
    state = TrialState(row["state"])
    is_full = state is TrialState.COMPLETE and bool(rungs)
    return TrialRecord(
        number=row["number"],
        origin=Origin(row["origin"]),
        label=row["label"],
        state=state,
        recipe=Recipe.from_json(row["recipe"]),
        configuration=row["configuration"],
        bracket=row["bracket"],
        reason=row["reason"],
        rungs=rungs,
        samples_scored=row["samples_scored"],
        samples_reused=row["samples_reused"],
        timings_s=row["timings_s"],
        values=rungs[-1].values if is_full else {},
        standard_errors=rungs[-1].standard_errors if is_full else {},
    )


def sample_result(row: sa.Row[Any]) -> SampleResult:
    tokens = None if row.tokens is None else tuple(map(tuple, json.loads(row.tokens)))
    return SampleResult(row.objective, row.position, row.document, row.value, row.response, row.is_truncated, tokens)


def num_tokens(text: sa.ColumnElement[Any]) -> sa.ColumnElement[int]:
    """SQL expression for the number of tokens in a column that `tokens_text` wrote.

    It is one more than the commas, less the completions without tokens.
    """
    commas = sa.func.length(text) - sa.func.length(sa.func.replace(text, ",", ""))
    empty = sa.func.length(text) - sa.func.length(sa.func.replace(text, "[]", "]"))
    return commas + 1 - empty


def tokens_text(tokens: Sequence[Sequence[int]] | None) -> str | None:
    """Text that stores a sample's tokens: JSON without spaces, about as large as the completions themselves."""
    return None if tokens is None else json.dumps(tokens, separators=(",", ":"))
