"""One evaluation: the unit of work that the coordinator hands to Ray Tune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from search_spaces.recipe import Recipe
from workers.types import Span, Split

__all__ = ["ChunkFailed", "Crash", "Evaluation", "FailureKind"]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What is still to be scored of one trial at one rung (on holdout data: on all of it). `crashes`: how many engines
    have crashed with one of its chunks."""

    study: str
    trial: int
    rung: int
    split: Split
    recipe: Recipe
    chunks: tuple[tuple[Span, ...], ...]
    crashes: int = 0

    def __repr__(self) -> str:  # Tune uses it in tags and folder names
        return f"trial-{self.trial}-{self.split}-{self.rung}"

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:  # immutable, and Tune copies every configuration
        return self


class FailureKind(StrEnum):
    """Why a chunk was not scored: the candidate cannot be scored, a task's metric failed on its answers, the engine
    crashed with it, no engine is available, or an engine held another merge than the requested one."""

    TRIAL = "trial"
    METRIC = "metric"
    CRASH = "crash"
    ENGINE = "engine"
    EVIDENCE = "evidence"


@dataclass(frozen=True)
class Crash:
    """An engine that crashed with a chunk; `scored_others` and `has_error` as in workers.errors.EngineCrashed."""

    chunk: tuple[Span, ...]
    replica: str
    scored_others: bool
    has_error: bool


@dataclass(frozen=True)
class ChunkFailed:
    """A chunk that was not scored, and why; `crash` if the engine crashed with it."""

    kind: FailureKind
    reason: str
    crash: Crash | None = None
