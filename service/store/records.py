"""What comes out of the store: its rows as records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from search_spaces.recipe import Recipe
from service.types import Origin, RungRecord, StudyRecord, StudyState, TrialRecord, TrialState

__all__ = ["BracketRecord", "EventRecord", "study_record", "trial_record"]


@dataclass(frozen=True)
class BracketRecord:
    """A bracket as it was opened: its index, the rung it starts at, and how many configurations it takes."""

    bracket: int
    first_rung: int
    size: int


@dataclass(frozen=True)
class EventRecord:
    """One thing that happened. `id` grows with time and is never reused."""

    id: int
    time: float
    kind: str
    payload: Mapping[str, Any]


def study_record(row: sa.RowMapping) -> StudyRecord:
    values = {name: value for name, value in row.items() if name != "idempotency_key"}
    return StudyRecord(**{**values, "state": StudyState(row["state"])})


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
